"""The worker process of a scorer: starts it in confinement, and sends it requests."""

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from envs.errors import ScorerFailed
from envs.scoring.family import Family
from envs.scoring.sandbox import PROCESS, Wrap, bubblewrap_command
from envs.scoring.worker import MAX_FRAME, frame

START_DEADLINE_S = 60.0
KILL_DEADLINE_S = 5.0
LONGEST_LINE = 300


class ScorerProcess:
    """One worker process and its pipes. Calls block, and there is one request at a time.

    Raises:
        TimeoutError: the worker did not answer within `START_DEADLINE_S`.
        ScorerFailed: the worker cannot be started, ended, or sent nonsense.
    """

    def __init__(self, family: Family, wrap: Wrap) -> None:
        command = [sys.executable, "-m", "envs.scoring.worker"]
        opening = {"family": family.name, "config": family.config, "seed": family.seed}
        opening |= {"heldout_share": family.heldout_share, "apart": family.runs_answers}
        opening["bubblewrap"] = wrap != PROCESS
        # bubblewrap says here why it cannot start. Inside, the library's imports print warnings here, too.
        with tempfile.TemporaryFile() as noise:
            try:
                if wrap != PROCESS:
                    command = bubblewrap_command(wrap, command)
                self._process = _start(command, None if wrap == PROCESS else noise)
            except OSError as error:
                raise ScorerFailed(f"{command[0]}: {error.strerror}") from None
            try:
                self.opened = self.request(opening, START_DEADLINE_S)
            except ScorerFailed as error:
                self.close()
                raise ScorerFailed(f"{error}{_last_line(noise)}") from None
            except BaseException:
                self.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def request(self, message: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send a request and wait for the reply.

        Raises:
            TimeoutError: no reply came within ``deadline_s``.
            ScorerFailed: the process ended or sent nonsense.
        """
        until = time.monotonic() + deadline_s
        try:
            self._write(frame(message), until)
        except BrokenPipeError:
            raise self._has_ended() from None
        size = int.from_bytes(self._read(4, until), "little")
        if size > MAX_FRAME:
            raise ScorerFailed(f"scorer process {self.pid}: reply of {size} bytes, at most {MAX_FRAME}")
        try:
            return msgspec.msgpack.decode(self._read(size, until), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ScorerFailed(f"scorer process {self.pid} sent nonsense: {error}") from None

    def close(self) -> None:
        self._process.kill()
        # If even a killed process does not end, the kernel holds it, and there is nothing more to do.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_DEADLINE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _has_ended(self) -> ScorerFailed:
        try:
            code: int | str = self._process.wait(KILL_DEADLINE_S)
        except subprocess.TimeoutExpired:
            code = "unknown"
        return ScorerFailed(f"scorer process {self.pid} has ended (exit code {code})")

    def _write(self, data: bytes, until: float) -> None:
        """Write all of the data, but not longer than ``until``, because the worker may not read."""
        assert self._process.stdin is not None
        descriptor = self._process.stdin.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        left = memoryview(data)
        while left:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError(f"scorer process {self.pid} did not read a request in time")
            # A pipe that polls as writable takes at least PIPE_BUF bytes without blocking.
            left = left[os.write(descriptor, left[: select.PIPE_BUF]) :]

    def _read(self, size: int, until: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        pieces = bytearray()
        while len(pieces) < size:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError(f"scorer process {self.pid} did not answer in time")
            piece = os.read(descriptor, size - len(pieces))
            if not piece:
                raise self._has_ended()
            pieces += piece
        return bytes(pieces)


def _start(command: list[str], stderr: IO[bytes] | None) -> subprocess.Popen[bytes]:
    environment = {
        "PATH": os.defpath,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PYTHONDONTWRITEBYTECODE": "1",
        # The library and its dependencies are compiled at each start, and some of them have sloppy syntax.
        "PYTHONWARNINGS": "ignore::SyntaxWarning",
        # Families that iterate over sets must give equal entries in every process.
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        bufsize=0,
        env=environment,
        cwd="/",
    )


def _last_line(noise: IO[bytes]) -> str:
    """Return what was last printed, with a colon in front; empty if nothing was."""
    noise.seek(0)
    lines = noise.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:LONGEST_LINE]}" if lines else ""
