"""The suite of agents: rows, and a function or a program of its own that runs an agent on one of them."""

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_args

from envs.agent.endpoint import LISTEN, Endpoint, place_of
from envs.agent.episode import AgentEpisode, AgentRules
from envs.agent.message_tree import Trained
from envs.base import ChatMessage, Env, Split, SuiteFacts
from envs.errors import EnvError
from envs.messages import message_of
from envs.reasoning_gym_suite import task_of
from envs.rows.reading import DataRow, divided, key_of, of_task, read_rows
from envs.user_code import absolute_beside_run_file, code_beside_run_file, code_file, load_callable
from protocol.security.http import CERTIFICATE_FILE

GUARD = Path(__file__).with_name("guard.py")
CERTIFICATE = "OFFBEAT_CERTIFICATE"
"""Variable with the path of the endpoint's certificate, if it speaks TLS."""
KEPT_BYTES = 65_536
"""Bytes of the output's end that are kept."""
TAIL_LINES = 8
"""Lines of the output that an error shows."""
END_S = 3.0
"""Longest time that the guard may take to end once the agent has."""
REST_S = 0.5
"""Longest time for what is left of the output."""


def agent_command(
    command: Sequence[str], variables: Mapping[str, str] | None = None
) -> Callable[..., Coroutine[Any, Any, str]]:
    """Return a coroutine function that runs a command as an agent, and returns the end of its output.

    The command gets the row as JSON on its standard input, and the address and the key as `OPENAI_BASE_URL` and
    `OPENAI_API_KEY`, and as `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`. When it has ended, or is no longer wanted,
    all that it has started is killed.

    Args:
        command: program and arguments; a program without a slash is looked for in PATH.
        variables: further variables of its environment.

    Raises:
        RuntimeError: the command ended with a status other than 0; the text has its last lines.
    """

    async def run(row: dict[str, Any], base_url: str, api_key: str) -> str:
        # Rows of data sets may have values that JSON does not know, such as dates.
        data = json.dumps(row, default=str).encode()
        environment = {**os.environ, **(variables or {}), **_access(base_url, api_key)}
        process, read, ours = await _start(command, environment)
        output = deque[bytes]()
        reading = asyncio.create_task(_keep_end(read, output))
        try:
            await _write(process.stdin, data)
            await process.wait()
        finally:
            os.close(ours)
            await _end(process, reading)
        text = b"".join(output).decode(errors="replace")
        if process.returncode:
            raise RuntimeError(
                f"the agent {command[0]!r} ended with status {process.returncode}: {last_lines(text)}"
            )
        return text

    return run


def last_lines(output: str) -> str:
    """Return the end of an output on one line, the very last line first, because an error may be cut short.

    Example:
        >>> last_lines("Traceback\\n  run()\\nKeyError: 'a'\\n")
        "KeyError: 'a' (before it: Traceback / run())"
    """
    *before, last = [line.strip() for line in output.strip().splitlines()[-TAIL_LINES:]] or ["no output"]
    return f"{last} (before it: {' / '.join(before)})" if before else last


def _access(base_url: str, api_key: str) -> dict[str, str]:
    """Return the variables in which clients look for address and key. Anthropic's client adds `/v1` itself.

    Example:
        >>> _access("http://127.0.0.1:80/s/1/v1", "key")["ANTHROPIC_BASE_URL"]
        'http://127.0.0.1:80/s/1'
    """
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }


async def _start(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[asyncio.subprocess.Process, int, int]:
    """Start a command under its guard.

    Returns:
        The guard's process, the end of the pipe from which the output is read, and our end of the guard's own pipe:
        when it is closed, the guard kills all that the command has started.
    """
    theirs, ours = os.pipe()
    read, written = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(GUARD), str(theirs), *command),
            stdin=asyncio.subprocess.PIPE,
            # Not asyncio's own pipe: a wait for the process would then wait for all who hold it open.
            stdout=written,
            stderr=written,
            env=environment,
            start_new_session=True,
            pass_fds=(theirs,),
        )
    except BaseException:
        os.close(ours)
        os.close(read)
        raise
    finally:
        os.close(theirs)
        os.close(written)
    return process, read, ours


async def _end(process: asyncio.subprocess.Process, reading: "asyncio.Task[None]") -> None:
    """Wait until the guard, whose pipe is closed, has ended; kill it if it does not."""
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
    # All who could write are gone; only a process that the guard did not find may still hold the pipe.
    await asyncio.wait({reading}, timeout=REST_S)
    reading.cancel()
    await asyncio.wait({reading}, timeout=REST_S)


async def _write(stdin: asyncio.StreamWriter | None, data: bytes) -> None:
    assert stdin is not None
    # An agent need not read its row.
    with suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(data)
        await stdin.drain()
    stdin.close()


async def _keep_end(read: int, output: deque[bytes]) -> None:
    """Read a pipe to its end, and keep the last `KEPT_BYTES` of it, or a little more."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read, "rb", 0)
    )
    size = 0
    try:
        while data := await stream.read(16_384):
            output.append(data)
            size += len(data)
            while size - len(output[0]) >= KEPT_BYTES:
                size -= len(output.popleft())
    finally:
        transport.close()
        # It closes the pipe at the loop's next turn.
        await asyncio.sleep(0)


FILES = ("train", "heldout")
"""Parameters that name a data set."""


class AgentSuite:
    """Suite with one task for each row of a data set. The user's agent works on the row.

    The agent speaks to an endpoint in the form of OpenAI's API, and its function returns the reward.

    Args:
        run: the agent, as ``file.py:function`` or ``module:function``. It takes ``(row, base_url, api_key)``, is
            asynchronous or plain, and returns a number or a table of numbers by name. Or a list: the program and the
            arguments of a command, see `envs.agent.suite`.
        train: file of the rows (.jsonl, .jsonl.gz, .json, .csv, .parquet), or a data set of the hub.
        score: function that scores an episode when the agent has ended, in place of what it returns. It takes
            ``(row, result)``: the row, and what the agent returned, or the end of a command's output. Empty: none.
        heldout: file of the held-out rows, or the share of the rows of ``train`` that is held out, by a hash of the
            row, at least 0 and below 1.
        correct: reward that says whether a task was solved. Empty: the only one.
        solved_at: smallest value of this reward with which a task counts as solved.
        seed: seed of the order of the rows in each epoch.
        trained: which answers are trained. "tools": those to requests with tools, if the episode has any. "main": those
            to requests with the tools of the longest conversation. "all": those to titles and probes, too.
        timeout_s: longest time from the agent's start to its end, in seconds; 0: no bound of its own.
        at_timeout: "fail": the episode of an agent that takes longer fails. "score": the agent is ended, and scored as
            it stands.
        history: "sampled": what was sampled stays in the context, however it comes back. "template": each request is
            rendered as a whole, as other servers do it. Where the template changes an earlier answer, as by leaving
            out its thought, a branch begins.
        listen: HOST:PORT of the endpoint; port 0 takes a free one. Hosts other than loopback need ``keys``.
        keys: folder with the certificate (`http.crt`) and its private key, see `offbeat keys make`. With it, the
            endpoint speaks TLS only.
        advertised_host: host in the address that agents get; empty: that of ``listen``, or this machine's name.

    Raises:
        EnvError: a file, a row, the function or a setting is wrong; the text names file and line.
    """

    def __init__(
        self,
        run: str | list[str],
        train: str,
        score: str = "",
        heldout: str | float = 0.1,
        correct: str = "",
        solved_at: float = 1.0,
        seed: int = 0,
        trained: str = "tools",
        timeout_s: float = 0.0,
        at_timeout: str = "fail",
        history: str = "sampled",
        listen: str = LISTEN,
        keys: str = "",
        advertised_host: str = "",
    ) -> None:
        self._rules = _rules(timeout_s, at_timeout, history)
        if trained not in get_args(Trained):
            raise EnvError(f"params.trained = {trained!r}: give one of {', '.join(get_args(Trained))}")
        self._trained = cast(Trained, trained)
        if isinstance(run, list) and not (run and all(isinstance(word, str) for word in run)):
            raise EnvError(f"params.run = {run!r}: a command is a list of texts, the program first")
        place = place_of(listen, keys, advertised_host)
        access = {CERTIFICATE: str(place.keys / CERTIFICATE_FILE)} if place.keys is not None else {}
        loaded: dict[str, ModuleType] = {}
        self._run = (
            agent_command(run, access) if isinstance(run, list) else load_callable(run, "agent", loaded)
        )
        self._score = load_callable(score, "score", loaded) if score else None
        self._correct, self._solved_at, self._seed = correct, float(solved_at), seed
        self._rows = _split(read_rows(train, "params.train"), heldout)
        self._endpoint, self._port = Endpoint(place), place.port

    @staticmethod
    def find_files(params: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return the params with the paths by which every role finds the files; see `envs.registry.beside`."""
        found = dict(params)
        for name in (*FILES, *(("keys",) if found.get("keys") else ())):
            if isinstance(found.get(name), str):
                found[name] = absolute_beside_run_file(found[name], folder)
        for name in ("run", "score"):
            if isinstance(found.get(name), str) and found[name]:
                found[name] = code_beside_run_file(found[name], folder, absolute_beside_run_file)
        return found

    @staticmethod
    def files(params: dict[str, Any]) -> list[str]:
        """Return the files that make the tasks: those of the rows, and of the agent."""
        code = [params.get(name) for name in ("run", "score")]
        named = [
            *(params.get(name) for name in FILES),
            *(code_file(name) for name in code if isinstance(name, str)),
        ]
        return [text for text in named if isinstance(text, str) and text]

    @staticmethod
    def fingerprint(params: dict[str, Any]) -> str:
        """Return a hash of the training rows' file, by which a tiny model made from it is kept; "" without one."""
        path = Path(str(params.get("train")))
        return blake2b(path.read_bytes(), digest_size=8).hexdigest() if path.is_file() else ""

    def episode(self) -> Env:
        episode = AgentEpisode(
            self._run,
            self._score,
            self._endpoint,
            self._begin,
            self._solved,
            self._trained,
            self._rules,
        )
        return cast(Env, episode)

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return the conversation in a row's column `messages`.

        Raises:
            LookupError: the row has none. What an agent would send is not known beforehand.
        """
        messages = self._row(index, split).values.get("messages")
        if not isinstance(messages, list) or not messages:
            raise LookupError("a row of an agent has a demonstration only if it has the column `messages`")
        try:
            return [message_of(message, whole=True) for message in messages]
        except EnvError as error:
            raise EnvError(f"{self._row(index, split).place}: column 'messages': {error}") from None

    def facts(self) -> SuiteFacts:
        """Return the number of held-out rows, and the port of the endpoint. An agent writes its prompts itself."""
        return SuiteFacts(
            heldout_tasks=len(self._rows["heldout"]),
            train_tasks=len(self._rows["train"]),
            hints=False,
            own_prompts=True,
            fixed_ports=(self._port,) if self._port else (),
        )

    def gauges(self) -> dict[str, float]:
        """Return what agents asked for, and what became of it."""
        return self._endpoint.counts.gauges()

    async def close(self) -> None:
        await self._endpoint.close()

    def _begin(self, data: dict[str, Any]) -> DataRow:
        row = self._row(*task_of(data))
        # Code of the user may change what it is given, and the row comes again in other episodes.
        return replace(row, values=deepcopy(row.values))

    def _row(self, index: int, split: Split) -> DataRow:
        return of_task(self._rows, index, split, self._seed)

    def _solved(self, rewards: dict[str, float]) -> bool | None:
        """Return whether the reward that decides is high enough; None if it is not known which one decides."""
        name = self._correct or (next(iter(rewards)) if len(rewards) == 1 else "")
        return rewards[name] >= self._solved_at if name in rewards else None


def _rules(timeout_s: float, at_timeout: str, history: str) -> AgentRules:
    """Return the rules of episodes.

    Raises:
        EnvError: a setting is wrong.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s >= 0:
        raise EnvError(f"params.timeout_s = {timeout_s!r}: give a number of seconds, or 0 for no bound")
    if at_timeout not in ("fail", "score"):
        raise EnvError(f'params.at_timeout = {at_timeout!r}: give "fail" or "score"')
    if history not in ("sampled", "template"):
        raise EnvError(f'params.history = {history!r}: give "sampled" or "template"')
    return AgentRules(float(timeout_s), at_timeout == "score", history == "template")


def _split(rows: list[DataRow], heldout: str | float) -> dict[Split, list[DataRow]]:
    """Return the rows of both splits.

    Raises:
        EnvError: the share is no share, the file cannot be read, or no row is left to train on.
    """
    if isinstance(heldout, str):
        others = read_rows(heldout, "params.heldout")
        known = {key_of(row.values) for row in others}
        own = [row for row in rows if key_of(row.values) not in known]
    else:
        cure = "name a file, or a share of the rows"
        own, others = divided(rows, heldout, lambda row: row.values, cure)
    if not own:
        raise EnvError(f"params.heldout = {heldout!r} leaves none of the {len(rows)} rows to train on")
    return {"train": own, "heldout": others}
