"""The worker process of a scorer: how it is confined, and the requests put to it."""

import contextlib
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from envs.errors import EnvError, ScorerFailed
from envs.scorer_worker import MAX_FRAME, frame

Wrap = Literal["bwrap", "bwrap-userns", "process"]

START_DEADLINE_S = 60.0
KILL_DEADLINE_S = 5.0


@dataclass(frozen=True)
class Family:
    """What a worker is opened with.

    Raises:
        EnvError: there would be nothing to train on, or nothing held out.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    heldout_share: float = 0.125

    def __post_init__(self) -> None:
        if not 0.0 < self.heldout_share < 1.0:
            raise EnvError(
                f"heldout_share = {self.heldout_share:g}: nothing would be left to "
                f"{'train on' if self.heldout_share >= 1 else 'evaluate on'}; choose it between 0 and 1"
            )


def bubblewrap_command(command: list[str], *, user_namespace: bool) -> list[str]:
    """Wrap a command: read-only system and Python, no network, own processes, an empty /tmp, nothing else.

    As root the worker changes to an unprivileged user itself, which needs two capabilities and is stronger
    (limits on processes do not hold for root); otherwise bubblewrap needs a user namespace.
    """
    roots = [Path(p) for p in ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")]
    python = {Path(p) for p in (sys.prefix, sys.base_prefix, *sys.path) if p and Path(p).is_dir()}
    package = Path(__file__).resolve().parent
    python -= {package.parent, Path.cwd(), Path("/")}
    binds = [*roots, *sorted(python), package]
    wrap = [
        "bwrap",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    if user_namespace:
        wrap += ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
    wrap += ["--cap-drop", "ALL"]
    if not user_namespace:
        wrap += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    wrap += ["--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev"]
    wrap += ["--size", str(16 << 20), "--tmpfs", "/tmp"]
    for path in binds:
        wrap += ["--ro-bind-try", str(path), str(path)]
    return [*wrap, "--chdir", "/", "--", *command]


class ScorerProcess:
    """One worker process and its pipes; blocking, one request at a time."""

    def __init__(self, family: Family, wrap: Wrap) -> None:
        command = [sys.executable, "-m", "envs.scorer_worker"]
        if wrap != "process":
            command = bubblewrap_command(command, user_namespace=wrap == "bwrap-userns")
        environment = {
            "PATH": os.defpath,
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",  # families that iterate over sets must give the same entry everywhere
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        # Inside bubblewrap the library's imports complain about missing font caches, at every start.
        noise = None if wrap == "process" else subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=noise,
            bufsize=0,
            env=environment,
            cwd="/",
        )
        opening = {"family": family.name, "config": family.config, "seed": family.seed}
        opening |= {"heldout_share": family.heldout_share, "bubblewrap": wrap != "process"}
        try:
            self.opened = self.request(opening, START_DEADLINE_S)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def request(self, message: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Put a request and wait for the reply.

        Raises:
            TimeoutError: no reply within ``deadline_s``.
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
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # the kernel holds it; nothing is to be had from it
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
        """All of it; a worker that does not read must not hold up who writes."""
        assert self._process.stdin is not None
        descriptor = self._process.stdin.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        left = memoryview(data)
        while left:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError(f"scorer process {self.pid} did not read a request in time")
            left = left[os.write(descriptor, left[: select.PIPE_BUF]) :]  # so much fits once there is room

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
