"""Teachers: models behind OpenAI-compatible URLs that write answers in place of the policy.

A teacher gets the words of a conversation and gives words back, which become tokens of the policy's model. They have no
behaviour probability and no version. A teacher that does not answer fails one episode, and is left alone for a while.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import aiohttp
import numpy as np

from actors.config import Teacher
from actors.errors import TeacherFailed
from actors.generator_client import TurnRequest
from actors.sampled import Sampled
from envs.rows.judge import BUSY, OWN, OWN_KEY, OWN_MODEL, OWN_URL, RETRY_S, SHOWN_CHARS, body_of

log = logging.getLogger(__name__)


class AskedTeacher:
    """One teacher, as a source of action turns. All calls are for one event loop.

    Args:
        config: URL, model and limits.
        tokens: returns the tokens of an answer, with an end token.
        session: returns the connections of all teachers.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        config: Teacher,
        tokens: Callable[[str], list[int]],
        session: Callable[[], aiohttp.ClientSession],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._tokens, self._session, self._clock = config, tokens, session, clock
        self._room = asyncio.Semaphore(config.concurrent)
        self._rests_until, self._why = -1.0, ""
        self.answers = self.failures = self.waiting = 0

    async def turn(self, request: TurnRequest) -> AsyncGenerator[Sampled, None]:
        """Yield the answer to a conversation, as one piece.

        Raises:
            TeacherFailed: there is no answer within `timeout_s`, none that can be used, or the teacher rests.
        """
        if not request.messages:
            raise TeacherFailed(f"{self._config.words} cannot be asked: the agent writes its own requests")
        if self._rests_until > self._clock():
            self.failures += 1
            # The seconds that are left would make each such failure one of a kind.
            raise TeacherFailed(
                f"{self._config.words} is left alone for {self._config.rest_s:g} s after: {self._why}"
            )
        self.waiting += 1
        try:
            text = await self._answer(request)
        except TeacherFailed as error:
            self.failures += 1
            if self._rests_until < self._clock():
                log.warning("%s; it is not asked for %g s", error, self._config.rest_s)
            self._rests_until, self._why = self._clock() + self._config.rest_s, str(error)
            raise
        finally:
            self.waiting -= 1
        self.answers += 1
        ids = self._tokens(text)
        cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        yield Sampled(
            np.array(ids, np.int32),
            np.zeros(len(ids), np.float32),
            np.full(len(ids), -1, np.int32),
            finish_reason="length" if cut else "stop",
            generator=self._config.words,
        )

    async def _answer(self, request: TurnRequest) -> str:
        own, last = self._config, ""
        try:
            async with asyncio.timeout(own.timeout_s), self._room:
                wait_s = RETRY_S
                while True:
                    text, last = await self._ask(request)
                    if not last:
                        return text
                    await asyncio.sleep(wait_s)
                    wait_s *= 2
        except TimeoutError:
            why = f": {last}" if last else ""
            raise TeacherFailed(
                f"{own.words}: no answer within timeout_s = {own.timeout_s:g} s{why}"
            ) from None

    async def _ask(self, request: TurnRequest) -> tuple[str, str]:
        """Return the teacher's answer, or why it is worth to ask again.

        Raises:
            TeacherFailed: the teacher refuses the request, or its answer is none.
        """
        own = self._config
        url, model, key_name = own.url, own.model, own.api_key_env
        if own.url == OWN:
            url, model, key_name = os.environ.get(OWN_URL, ""), OWN_MODEL, OWN_KEY
        key = os.environ.get(key_name, "")
        asked = {
            "model": model,
            # A result of a tool needs the id of a call, and a teacher makes none: what it hears, it hears as words.
            "messages": [
                {"role": "user" if m["role"] == "tool" else m["role"], "content": m["content"]}
                for m in request.messages
            ],
            "temperature": own.temperature,
            **({} if own.max_tokens is None else {"max_tokens": own.max_tokens}),
        }
        try:
            async with self._session().post(
                f"{url.rstrip('/')}/chat/completions",
                json=asked,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                # A redirect would take the conversation elsewhere.
                allow_redirects=False,
            ) as reply:
                body = await body_of(reply)
                if reply.status != 200:
                    said = f"HTTP status {reply.status}: {shown(body, key)}"
                    if reply.status in BUSY:
                        return "", said
                    raise TeacherFailed(
                        f"{own.words}: {said}; correct [[actor.teachers]], or the key in {key_name}"
                    )
        except (aiohttp.ClientError, ValueError) as error:
            return "", type(error).__name__
        return answer_in(body, own.words), ""


def shown(body: bytes, key: str) -> str:
    """Return the beginning of a server's words, without the key, which some servers repeat.

    Example:
        >>> shown(b"Incorrect API key: sk-1234", "sk-1234")
        'Incorrect API key: ***'
    """
    text = body.decode(errors="replace")
    return (text.replace(key, "***") if key else text)[:SHOWN_CHARS]


def answer_in(body: bytes, where: str) -> str:
    """Return the text of a chat completion.

    Args:
        body: body of the answer.
        where: name of the teacher, for errors.

    Raises:
        TeacherFailed: there is no text in it.

    Example:
        >>> answer_in(b'{"choices": [{"message": {"content": "42"}}]}', "teacher big")
        '42'
    """
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
        # A lone surrogate is no text, and no tokenizer takes it.
        if not isinstance(text, str) or not text.strip() or not text.encode():
            raise ValueError
    except (LookupError, TypeError, ValueError, RecursionError):
        raise TeacherFailed(f"{where}: its answer is not that of a chat completion, or has no text") from None
    return text


class UnknownTeacher:
    """A teacher that a task names and this actor does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def turn(self, request: TurnRequest) -> AsyncGenerator[Sampled, None]:
        """Fail."""
        raise TeacherFailed(f"teacher {self._name} is not in [[actor.teachers]] of this actor")
        yield


class Teachers:
    """The teachers of an actor, by name.

    Args:
        configs: their settings.
        tokens: returns the tokens of an answer, with an end token.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        configs: Sequence[Teacher],
        tokens: Callable[[str], list[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opened: aiohttp.ClientSession | None = None
        self._named = {each.name: AskedTeacher(each, tokens, self._session, clock) for each in configs}

    def named(self, name: str) -> "AskedTeacher | UnknownTeacher":
        """Return a teacher; one that this actor does not know fails all its turns."""
        return self._named.get(name) or UnknownTeacher(name)

    @property
    def waiting(self) -> int:
        """Turns that wait for a teacher, each at most its `timeout_s`."""
        return sum(teacher.waiting for teacher in self._named.values())

    @property
    def gauges(self) -> dict[str, float]:
        """Answers and failures so far; empty without teachers."""
        if not self._named:
            return {}
        every = self._named.values()
        return {
            "teacher_answers_total": float(sum(teacher.answers for teacher in every)),
            "teacher_failures_total": float(sum(teacher.failures for teacher in every)),
        }

    async def close(self) -> None:
        """Close connections."""
        if self._opened is not None:
            await self._opened.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = aiohttp.ClientSession()
        return self._opened
