"""The worker process of a scorer: starts it in confinement (bubblewrap, or fewer rights), and sends it requests."""

import contextlib
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

import msgspec

from envs.errors import EnvError, RefusedFamily, ScorerFailed
from envs.scoring.questions import ACCEPTS_JUNK, Family
from envs.scoring.worker import MAX_FRAME, frame

Sandbox = Literal["auto", "bwrap", "process"]

HELP_DEADLINE_S = 10.0
STANDARD_LIBRARY = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Wrap:
    """One way to start a worker.

    Attributes:
        name: "bwrap", "bwrap-userns" or "process".
        program: absolute path of bubblewrap; empty for a plain process.
    """

    name: Literal["bwrap", "bwrap-userns", "process"]
    program: str = ""


PROCESS = Wrap("process")


def ways_to_start(family: Family, sandbox: Sandbox) -> list[Wrap]:
    """Return the ways to start the worker, strongest first. A plain process comes last, if it is allowed.

    Raises:
        EnvError: there is no such sandbox, or the settings of a composite name no families.
        RefusedFamily: the family's scorer accepts junk. Or bubblewrap is not installed although ``sandbox``
            asks for it, or not used although the scorer runs answers as Python.

    Example:
        >>> ways_to_start(Family("coin_flip"), "process")
        Traceback (most recent call last):
        ...
        envs.errors.RefusedFamily: reasoning_gym family 'coin_flip': its scorer accepts junk; use another
    """
    if sandbox not in get_args(Sandbox):
        raise EnvError(f"sandbox = {sandbox!r}: use one of {', '.join(get_args(Sandbox))}")
    for member in sorted(family.members & ACCEPTS_JUNK):
        raise RefusedFamily(f"reasoning_gym family {member!r}: its scorer accepts junk; use another")
    program = shutil.which("bwrap") if sandbox != "process" else None
    if program is None and family.runs_answers:
        raise RefusedFamily(
            f"reasoning_gym family {family.name!r}: its scorer runs the answer as Python code; "
            'install bubblewrap and set sandbox = "bwrap"'
        )
    if program is None and sandbox == "bwrap":
        raise RefusedFamily('sandbox = "bwrap", but there is no bwrap on PATH; install bubblewrap')
    if program is None:
        return [PROCESS]
    # The worker is started in a different folder and with a different PATH.
    program = os.path.abspath(program)
    ways = [Wrap("bwrap", program)] if os.geteuid() == 0 else []
    ways.append(Wrap("bwrap-userns", program))
    return [*ways, PROCESS] if sandbox == "auto" and not family.runs_answers else ways


def bubblewrap_command(wrap: Wrap, command: list[str], *, for_programs: bool = False) -> list[str]:
    """Wrap a command in bubblewrap: it sees only the system, Python and this package, all read-only.

    It has no network, its own processes and an empty /tmp. The command is the first of its processes, so it
    sees no process of bubblewrap. Without a user namespace ("bwrap") the caller has to be root, and the worker
    changes to an unprivileged user itself. That needs two capabilities and is stronger, because limits on
    processes do not hold for root. Any other user needs a user namespace ("bwrap-userns").

    Args:
        for_programs: whether programs of a model run inside. They see the standard library and `envs.scoring`, no
            folder that can be written, four devices and no /proc.

    Raises:
        OSError: bubblewrap cannot be started.
    """
    roots = [Path(p) for p in ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")]
    python = {Path(p) for p in (sys.prefix, sys.base_prefix, *sys.path) if p and Path(p).is_dir()}
    package = Path(__file__).resolve().parents[1]
    python -= {package.parent, Path.cwd(), Path("/")}
    if for_programs:
        # The folder of the user's own code may hold the rows, with their tests.
        python, package = {Path(sys.base_prefix), Path(STANDARD_LIBRARY)}, Path(__file__).resolve().parent
    binds = [*roots, *sorted(python), package]
    words = [wrap.program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--as-pid-1"]
    words += ["--unshare-cgroup-try"]
    if wrap.name == "bwrap-userns":
        words += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        if can_disable_namespaces(wrap.program):
            words += ["--disable-userns"]
    words += ["--cap-drop", "ALL"]
    if wrap.name == "bwrap":
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    words += ["--die-with-parent", "--new-session"]
    if not for_programs:
        words += ["--proc", "/proc", "--dev", "/dev", "--size", str(16 << 20), "--tmpfs", "/tmp"]
    # bubblewrap makes missing folders above a bound one with mode 700, of root. Some imports come later, when
    # the worker is an unprivileged user.
    for above in sorted({above for path in binds for above in path.parents} - {Path("/")}):
        words += ["--perms", "0755", "--dir", str(above)]
    for path in binds:
        words += ["--ro-bind-try", str(path), str(path)]
    if for_programs:
        words += ["--perms", "0755", "--dir", "/dev"]
        for device in ("null", "zero", "random", "urandom"):
            words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        words += ["--remount-ro", "/"]
    return [*words, "--chdir", "/", "--", *command]


def can_disable_namespaces(program: str) -> bool:
    """Return whether this bubblewrap has ``--disable-userns``, which version 0.8 brought.

    Raises:
        OSError: bubblewrap cannot be started.
    """
    try:
        said = subprocess.run(
            [program, "--help"], capture_output=True, text=True, timeout=HELP_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return "--disable-userns" in said.stdout + said.stderr


START_DEADLINE_S = 60.0
KILL_DEADLINE_S = 5.0
LONGEST_LINE = 300


class Form(NamedTuple):
    """How messages to and from a worker look as bytes.

    Attributes:
        frame: returns the bytes of a message, with its length of 4 bytes in front.
        parse: reads a message behind its length; raises ValueError for nonsense.
        most: longest message in bytes.
    """

    frame: Callable[[dict[str, Any]], bytes]
    parse: Callable[[bytes], dict[str, Any]]
    most: int


SCORER_FORM = Form(frame, partial(msgspec.msgpack.decode, type=dict[str, Any]), MAX_FRAME)


class WorkerProcess:
    """One worker process and its pipes. Calls block, and there is one request at a time.

    Args:
        module: module that the process runs.
        opening: first message; whether bubblewrap is used is added.
        wrap: way to start it.
        form: form of the messages.
        for_programs: see `bubblewrap_command`.

    Raises:
        TimeoutError: the worker did not answer within `START_DEADLINE_S`.
        ScorerFailed: the worker cannot be started, ended, or sent nonsense.
    """

    def __init__(
        self, module: str, opening: dict[str, Any], wrap: Wrap, form: Form, *, for_programs: bool = False
    ) -> None:
        self._form = form
        # Programs of a model have the standard library only, and so has what starts them.
        python = [os.path.realpath(sys.executable), "-S"] if for_programs else [sys.executable]
        command = [*python, "-m", module]
        # bubblewrap says here why it cannot start. Inside, the library's imports print warnings here, too.
        with tempfile.TemporaryFile() as noise:
            try:
                if wrap != PROCESS:
                    command = bubblewrap_command(wrap, command, for_programs=for_programs)
                self._process = _start(command, None if wrap == PROCESS else noise)
            except OSError as error:
                raise ScorerFailed(f"{command[0]}: {error.strerror}") from None
            try:
                self.opened = self.request({**opening, "bubblewrap": wrap != PROCESS}, START_DEADLINE_S)
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
            self._write(self._form.frame(message), until)
        except BrokenPipeError:
            raise self._has_ended() from None
        size = int.from_bytes(self._read(4, until), "little")
        if size > self._form.most:
            raise ScorerFailed(f"scorer process {self.pid}: reply of {size} bytes, at most {self._form.most}")
        try:
            return self._form.parse(self._read(size, until))
        except (msgspec.MsgspecError, ValueError) as error:
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


def scorer_process(family: Family, wrap: Wrap) -> WorkerProcess:
    """Start the worker of a scorer, see `WorkerProcess`."""
    opening = {"family": family.name, "config": family.config, "seed": family.seed}
    opening |= {"heldout_share": family.heldout_share, "apart": family.runs_answers}
    return WorkerProcess("envs.scoring.worker", opening, wrap, SCORER_FORM)


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
