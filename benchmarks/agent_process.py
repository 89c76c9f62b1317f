"""A process of agents: it reads jobs from its standard input, a line each, and writes a line for each result."""

import asyncio
import itertools
import json
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

END_S = 5.0
"""Longest time that the process may take to end once its standard input is closed."""
ENDED = "the process of the agents has ended"
Waiting = tuple[asyncio.AbstractEventLoop, "asyncio.Future[dict[str, Any]]"]


class AgentProcess:
    """Hands jobs to a process, and their results to who waits for them, in whatever event loop.

    The process ends with its standard input, so at the latest when this process ends.

    Args:
        command: program and arguments. The program writes ``{"number": ...}`` of the job with each result.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._numbers = itertools.count()
        # Invariant: the lock guards the table of those who wait, and the writing of whole lines.
        self._lock = threading.Lock()
        self._waiting: dict[int, Waiting] = {}
        self._over = False
        self._reader = threading.Thread(target=self._read, name="agents", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a job.

        Raises:
            RuntimeError: the process has ended, or its result is an error.
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Future[dict[str, Any]] = loop.create_future()
        with self._lock:
            if self._over:
                raise RuntimeError(ENDED)
            number = next(self._numbers)
            self._waiting[number] = loop, found
            assert self._process.stdin is not None
            # If the process has ended, whoever reads its output tells all who wait.
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps({**job, "number": number}).encode() + b"\n")
                self._process.stdin.flush()
        result = await found
        if "error" in result:
            raise RuntimeError(str(result["error"]))
        return result

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
        # A process that the agent has left behind may hold the pipe open.
        self._reader.join(END_S)
        if not self._reader.is_alive():
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            result = json.loads(line)
            with self._lock:
                waiting = self._waiting.pop(result["number"])
            _hand_over(waiting, result)
        with self._lock:
            self._over = True
            left = list(self._waiting.values())
        for waiting in left:
            _hand_over(waiting, {"error": ENDED})


def _hand_over(waiting: Waiting, result: dict[str, Any]) -> None:
    loop, found = waiting

    def set_result() -> None:
        # An episode that has ended waits no more.
        if not found.done():
            found.set_result(result)

    if not loop.is_closed():
        loop.call_soon_threadsafe(set_result)
