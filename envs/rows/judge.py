"""A reward from a language model: a prompt file asks it for a number, at an OpenAI-compatible URL.

A judge that does not answer is nobody's fault: the task runs again, and is never scored 0.
"""

import asyncio
import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import aiohttp
from pydantic import Field, ValidationError, model_validator

from envs.calls import without_thought
from envs.errors import EnvError, NotStarted, ServiceFailed
from envs.user_code import shown
from protocol.section import Section

COMPLETION = "completion"
"""Name of the model's answer in a prompt file. A column `answer` is the reference in most data sets."""
OWN = "own"
"""Word in place of a URL, for the judge that the run starts itself (`[judge]` in the run file)."""
OWN_URL, OWN_KEY = "OFFBEAT_JUDGE_URL", "OFFBEAT_JUDGE_KEY"
"""Environment variables of an actor with the base URL and the key of this judge."""
OWN_MODEL = "judge"
"""Name of the model that this judge serves."""
KEPT_SCORES = 65_536
"""Upper limit of the scores in the cache."""
RETRY_S = 0.5
"""Wait before the first repetition of a request; each further wait is twice as long."""
BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which a request is repeated."""
SHOWN_CHARS = 200
_FIELD = re.compile(r"\{(\w+)\}")
LONGEST_GIVEN = 64
"""Most characters of a number with its scale at the end of a judge's answer."""
ANSWER_BYTES = 2**20
"""Largest body of a judge's answer."""
_MARK = re.compile(r"\b(?:score|rating|grade)\b[^\S\n*]{0,8}\*{0,4}[^\S\n]{0,8}[:=]", re.IGNORECASE)
_DIGIT = re.compile(r"\d")
_STARTS = re.compile(r"(?<![\d.])\d")
_CLOSING = " \t*_`\"')]}>.!"
_JOINED = re.compile(
    r"(?:\d[\s,*_]*(?:to|or|and|x|->|[-\u2013\u2014\u2212\u00b1+*\u00d7/^<>\u2264\u2265\u2192])"
    r"|\bof(?:\s+(?:a|the|possible|maximum|max|total))*(?:\s+of)?"
    r"|\b(?:more|less|greater|fewer)\s+than|\bat\s+(?:least|most))[\s*_]*$",
    re.IGNORECASE,
)
"""What makes the number behind it the end of a range, a scale, a bound or an operand."""
_GIVEN = re.compile(
    r"[\s*_`\"'(\[{<$]*(?P<number>\d{1,18}(?:\.\d{1,18})?)"
    r"(?:\s{0,4}(?:/|out of|of)\s{0,4}(?P<scale>\d{1,18}(?:\.\d{1,18})?))?",
    re.IGNORECASE,
)


class JudgeSettings(Section):
    """`[env.params.reward.NAME]` of a judge."""

    judge: str = Field(pattern=r"^(https?://.*|own)$")
    """Base URL, up to and with `/v1`; or "own", the judge of `[judge]` in the run file."""
    model: str = ""
    """Name of the model at this URL."""
    prompt: str = Field(min_length=1)
    """File with the question to the judge. `{completion}` is the model's answer, `{COLUMN}` the row's value."""
    only_if: str = ""
    """Reward of the same table that is no judge with `only_if`. The judge is asked only if it is above 0; else the
    answer gets no reward of this name. Empty: the judge is always asked."""
    scale: float = Field(10.0, gt=0)
    """Largest number that the judge may give. The reward is its number divided by this one."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(512, ge=1)
    """Most tokens of the judge's answer."""
    concurrent: int = Field(8, ge=1)
    """Most requests at a time, of each actor."""
    timeout_s: float = Field(25.0, gt=0)
    """Longest time for one score, waits and repetitions included. Keep it below actor.env_timeout_s (30 s)."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key. If it is not set, no key is sent."""

    @model_validator(mode="after")
    def _own_or_elsewhere(self) -> Self:
        if self.judge == OWN and (self.model or "api_key_env" in self.model_fields_set):
            raise ValueError(
                'judge = "own" is the model of [judge], so it takes neither model nor api_key_env'
            )
        if self.judge != OWN and not self.model:
            raise ValueError("model is missing: name the model at this URL")
        return self

    @property
    def words(self) -> str:
        """The judge, for people."""
        return "the run's own judge" if self.judge == OWN else f"judge {self.model} at {self.judge}"


class Judge:
    """Scores answers. All calls are for one event loop.

    Args:
        settings: URL, model and limits.
        template: question to the judge, see `JudgeSettings.prompt`.
    """

    def __init__(self, settings: JudgeSettings, template: str) -> None:
        self._settings, self._template = settings, template
        self._scores: OrderedDict[bytes, asyncio.Task[float]] = OrderedDict()
        self._session: aiohttp.ClientSession | None = None
        self._room = asyncio.Semaphore(settings.concurrent)

    @property
    def only_if(self) -> str:
        """Name of the reward without which the judge is not asked; "" if it always is."""
        return self._settings.only_if

    @property
    def timeout_s(self) -> float:
        """Longest time of a call, in seconds."""
        return self._settings.timeout_s

    async def __call__(self, answer: str, row: dict[str, Any]) -> float:
        """Return the score of an answer. Equal questions are asked once.

        Raises:
            ServiceFailed: the judge did not give a number within `timeout_s`.
            NotStarted: the run's own judge has not been started, because there is no run yet.
            EnvError: the judge refuses the request, for example because the key is wrong.
        """
        if self._settings.judge == OWN and OWN_URL not in os.environ:
            raise NotStarted("the run's own judge is not there yet: the run starts it")
        question = filled(self._template, {**row, COMPLETION: answer})
        key = blake2b(question.encode(), digest_size=16).digest()
        if (asked := self._scores.get(key)) is None:
            asked = self._scores[key] = asyncio.create_task(self._within_limit(question), name="judge")
            while len(self._scores) > KEPT_SCORES:
                self._scores.popitem(last=False)
        try:
            # One episode's end must not take the score from the others that wait for it.
            return await asyncio.shield(asked)
        except (EnvError, asyncio.CancelledError):
            if asked.done():
                self._scores.pop(key, None)
            raise

    async def close(self) -> None:
        """End what is under way, and close connections."""
        for asked in self._scores.values():
            asked.cancel()
        if self._session is not None:
            await self._session.close()

    async def _within_limit(self, question: str) -> float:
        own, last = self._settings, ""
        try:
            async with asyncio.timeout(own.timeout_s), self._room:
                wait_s = RETRY_S
                while True:
                    text, last = await self._ask(question)
                    if not last:
                        score, last = score_in(text, own.scale)
                        if score is not None:
                            return score
                    await asyncio.sleep(wait_s)
                    wait_s *= 2
        except TimeoutError:
            why = last or f"it did not answer within {own.timeout_s:g} s"
            raise ServiceFailed(f"{own.words}: {why}") from None

    async def _ask(self, question: str) -> tuple[str, str]:
        """Return the judge's answer, or why it is worth to ask again.

        Raises:
            EnvError: the judge refuses the request.
        """
        own = self._settings
        if self._session is None:
            self._session = aiohttp.ClientSession()
        url, model, key_name = own.judge, own.model, own.api_key_env
        if own.judge == OWN:
            url, model, key_name = os.environ[OWN_URL], OWN_MODEL, OWN_KEY
        key = os.environ.get(key_name, "")
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": own.temperature,
            "max_tokens": own.max_tokens,
        }
        try:
            async with self._session.post(
                f"{url.rstrip('/')}/chat/completions",
                json=asked,
                headers={"Authorization": f"Bearer {key}"} if key else {},
            ) as reply:
                body = await body_of(reply)
                said = body.decode(errors="replace")[:SHOWN_CHARS]
                if reply.status in BUSY:
                    return "", f"HTTP status {reply.status}: {said}"
                if reply.status != 200:
                    raise EnvError(
                        f"{own.words}: HTTP status {reply.status}: {said}; correct the settings of the reward, or "
                        f"the key in {key_name}"
                    )
                content = json.loads(body)["choices"][0]["message"]["content"]
                return str(content or ""), ""
        except aiohttp.ClientError as error:
            return "", f"{type(error).__name__}: {error}"
        except (LookupError, TypeError, ValueError, RecursionError):
            return "", "the answer is not that of a chat completion"


async def body_of(reply: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer.

    Raises:
        ValueError: it is larger than any answer of a judge.
    """
    pieces = bytearray()
    async for piece in reply.content.iter_any():
        pieces += piece
        if len(pieces) > ANSWER_BYTES:
            raise ValueError(f"more than {ANSWER_BYTES} bytes")
    return bytes(pieces)


def score_in(text: str, scale: float) -> tuple[float | None, str]:
    """Return the number of a judge's answer divided by ``scale``, or None and what is wrong with it.

    The number stands behind a mark, `Score:`, `Rating:` or `Grade:`, alone on the rest of its line, or at the very end.
    ``7/10``, ``7 of 10`` and ``7 out of 10`` are 7 if the scale is 10. What could be another number is none: one with
    another scale, a range, a power, or marks with several numbers.

    Example:
        >>> score_in("Correct but long. Score: 7", scale=10.0), score_in("I give it 7/10.", scale=10.0)
        ((0.7, ''), (0.7, ''))
        >>> score_in("Good.", scale=10.0)
        (None, "its answer 'Good.' has no number from 0 to 10 behind 'Score:' or at its end")
    """
    said = without_thought(text).strip()
    marked = [_marked_number(line, scale) for line in _MARK.split(said)[1:]]
    numbers = set(marked) if marked else {_last_number(said, scale)}
    number = numbers.pop() if len(numbers) == 1 else None
    if number is not None:
        return number / scale, ""
    shown = said[-SHOWN_CHARS:]
    return None, f"its answer {shown!r} has no number from 0 to {scale:g} behind 'Score:' or at its end"


def _marked_number(behind: str, scale: float) -> float | None:
    """Return the number in the line behind a mark; None if there is none, or more than one."""
    line = behind.lstrip().partition("\n")[0]
    found = _GIVEN.match(line)
    if found is None or _DIGIT.search(line, found.end()):
        return None
    return _number(found, line, scale)


def _last_number(said: str, scale: float) -> float | None:
    """Return the number at the end of a text. Only punctuation and markup stand behind it."""
    line = said.rpartition("\n")[2].rstrip(_CLOSING)
    for begin in _STARTS.finditer(line, max(0, len(line) - LONGEST_GIVEN)):
        found = _GIVEN.fullmatch(line, begin.start())
        if found is not None:
            before = line[max(0, begin.start() - LONGEST_GIVEN) : begin.start()]
            return None if _JOINED.search(before) else _number(found, line, scale)
    return None


def _number(found: re.Match[str], line: str, scale: float) -> float | None:
    before, behind = line[: found.start("number")][-1:], line[found.end() :][:1]
    if (
        before.isalnum()
        or (before and before in "-+.,_/^\u2212\u2013\u00b1\u221a\u2264\u2265~")
        or behind.isalnum()
        or (behind and behind in "%/^_-")
    ):
        return None
    if found["scale"] is not None and float(found["scale"]) != scale:
        return None
    number = float(found["number"])
    return number if 0 <= number <= scale else None


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Return a template with ``{NAME}`` replaced. Other braces stay, because a question may hold code.

    Example:
        >>> filled("Is {answer} the sum of {a}? Write {}.", {"answer": "4", "a": "2 + 2"})
        'Is 4 the sum of 2 + 2? Write {}.'
    """
    return _FIELD.sub(lambda m: str(values[m[1]]) if m[1] in values else m[0], template)


def load_judge(name: str, table: Mapping[str, Any], columns: tuple[str, ...], data: str) -> tuple[Judge, str]:
    """Return the judge of a table of the run file, and its place for errors.

    Raises:
        EnvError: a setting is wrong, the prompt file cannot be read, or it has neither the answer nor a column.
    """
    where = f"params.reward.{name}"
    try:
        settings = JudgeSettings.model_validate(dict(table))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise EnvError(f"{where}.{field}: {first['msg']}") from None
    path = Path(settings.prompt)
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EnvError(f"{where}.prompt = {settings.prompt!r}: cannot be read ({error})") from None
    named = _FIELD.findall(template)
    if COMPLETION not in named:
        raise EnvError(
            f"{shown(str(path))}: {where}: the judge needs the model's answer; write {{completion}} where it stands"
        )
    for column in named:
        if column not in (COMPLETION, *columns):
            raise EnvError(
                f"{shown(str(path))}: {data} has no column {column!r} (columns: {', '.join(columns)})"
            )
    return Judge(settings, template), f"{shown(str(path))}: judge {settings.model or OWN}"


def asks_own_judge(params: Mapping[str, Any]) -> bool:
    """Return whether parameters of `rows` name the run's own judge for a reward.

    Example:
        >>> asks_own_judge({"reward": {"helpful": {"judge": "own", "prompt": "judge.txt"}}})
        True
    """
    reward = params.get("reward")
    tables = reward.values() if isinstance(reward, Mapping) else ()
    return any(isinstance(table, Mapping) and table.get("judge") == OWN for table in tables)
