"""The worker process of a scorer: starts it in confinement, and sends it requests."""

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
    """A family of reasoning_gym, its settings and the share held out: what a worker opens first.

    Raises:
        EnvError: no question would be left to train on, or none would be held out.
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
    """Wrap a command in bubblewrap: it sees only the system, Python and this package, all read-only.

    It has no network, its own processes and an empty /tmp. Without ``user_namespace`` the caller has to be
    root, and the worker changes to an unprivileged user itself. That needs two capabilities and is stronger,
    because limits on processes do not hold for root. Any other user needs a user namespace.
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
    """One worker process and its pipes. Calls block, and there is one request at a time.

    Raises:
        TimeoutError: the worker did not answer within `START_DEADLINE_S`.
        ScorerFailed: the worker ended or sent nonsense.
    """

    def __init__(self, family: Family, wrap: Wrap) -> None:
        command = [sys.executable, "-m", "envs.scorer_worker"]
        if wrap != "process":
            command = bubblewrap_command(command, user_namespace=wrap == "bwrap-userns")
        environment = {
            "PATH": os.defpath,
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
            # The library and its dependencies are compiled at each start, and some of them have sloppy syntax.
            "PYTHONWARNINGS": "ignore::SyntaxWarning",
            # Families that iterate over sets must give equal entries in every process.
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        # Inside bubblewrap the library's imports print warnings about missing font caches at every start.
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
