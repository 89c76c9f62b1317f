"""Runs an agent that is a program of its own: a process group, with the row, the address and the key handed over."""

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

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
