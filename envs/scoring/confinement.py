"""Rights that a scorer's processes give up before they read a model's answer, and a process of its own for one answer.

`score_apart` forks the process that holds the questions, so that an answer that runs as code meets no other answer. The
child has a copy of the questions, /dev/null, and a pipe for one number. It ends with its answer. What it changes in its
own memory is lost with it.
"""

import contextlib
import ctypes
import errno
import math
import os
import platform
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

NOBODY = 65_534
MEMORY_BYTES = 2 << 30

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_CLONE_ANY_NAMESPACE = 0x7E020080

_SECCOMP_MODE_FILTER = 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_CALL_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X32_CALLS = 0x40000000

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of `_CALLS`, and the kernel's number of the architecture."""
_CALLS = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "inotify_init1": (294, 26),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "prlimit64": (302, 261),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
"""Numbers of system calls on x86_64 and aarch64."""
_CLONE, _CLONE3 = (56, 220), (435, 435)

WORKER_CALLS = (
    *(
        "bpf",
        "io_uring_setup",
        "mount",
        "process_vm_readv",
        "process_vm_writev",
        "ptrace",
        "setns",
        "unshare",
    ),
)
"""System calls that a worker and its children never make. None of them may make a user namespace."""
CHILD_CALLS = (
    "kill",
    "pidfd_getfd",
    "pidfd_open",
    "pidfd_send_signal",
    "prlimit64",
    "socket",
    "tgkill",
    "tkill",
)
"""System calls with which an answer's process could reach its worker or make a channel."""
PROGRAM_CALLS = (
    *(
        "add_key",
        "inotify_init1",
        "keyctl",
        "memfd_create",
        "memfd_secret",
        "mq_open",
        "msgget",
        "perf_event_open",
        "request_key",
        "rt_sigqueueinfo",
        "rt_tgsigqueueinfo",
        "semget",
        "shmget",
        "socketpair",
        "userfaultfd",
    ),
)
"""Further system calls that a program of a model is refused: they keep memory of the kernel that no limit counts, or
that outlives the program."""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def give_up_rights(*, may_fork: bool) -> None:
    """Give up rights: no writing to files, bounded memory, no network if possible, no namespaces, no root.

    A process of root becomes the user nobody. Other processes of that user cannot read or write the memory
    and the descriptors of this one.

    Args:
        may_fork: whether the process starts a child for each answer; otherwise it can start no process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _leave_network(libc)
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, MEMORY_BYTES)]
    if not may_fork:
        limits.append((resource.RLIMIT_NPROC, 0))
    for limit, value in limits:
        resource.setrlimit(limit, (value, value))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Set this again, because a change of user clears it.
    die_with_parent()
    refuse_calls(WORKER_CALLS)
    os.chdir("/")


def give_up_the_rest(cpu_s: int) -> None:
    """Give up what the process of one answer does not need: other processes, signals, sockets and CPU time."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    # A forked process begins with no CPU time used.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    refuse_calls(CHILD_CALLS)


def allow_cpu(seconds: int) -> None:
    """Limit the CPU time of the next request. The kernel kills a process that exceeds it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def inside_bubblewrap() -> bool:
    """Return whether this process is really isolated: a first process, no network, no /sys."""
    network = {name for _, name in socket.if_nameindex()}
    return os.getpid() <= 3 and network <= {"lo"} and not os.path.exists("/sys")


def refuse_calls(names: Iterable[str]) -> bool:
    """Make these system calls fail with EPERM from now on, here and in children. Return whether they do.

    Whatever the names, no new process may be in a new namespace. A kernel without seccomp, or a processor that
    is neither x86_64 nor aarch64, changes nothing.
    """
    if (machine := _MACHINES.get(platform.machine())) is None:
        return False
    program = filter_program(names, *machine)
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    loaded = Program(len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(loaded), 0, 0) == 0)


def filter_program(names: Iterable[str], column: int, architecture: int) -> bytes:
    """Return the seccomp filter (classic BPF) of `refuse_calls`, 8 bytes an instruction.

    Args:
        names: keys of `_CALLS`.
        column: column of the numbers in `_CALLS`.
        architecture: the kernel's number of the architecture. Calls of any other one kill the process.

    Example:
        >>> len(filter_program(["ptrace"], *_MACHINES["x86_64"])) // 8
        15
    """

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("<HBBI", code, if_true, if_false, value)

    def refuse(number: int, error: int) -> list[bytes]:
        return [step(_EQUAL, number, 0, 1), step(_RETURN, _ERRNO | error)]

    program = [
        step(_LOAD, _ARCHITECTURE_AT),
        step(_EQUAL, architecture, 1, 0),
        step(_RETURN, _KILL),
        step(_LOAD, _CALL_AT),
        step(_AT_LEAST, _X32_CALLS, 0, 1),
        step(_RETURN, _KILL),
        # The filter cannot read clone3's flags. With ENOSYS the C library uses clone in its place.
        *refuse(_CLONE3[column], errno.ENOSYS),
    ]
    for name in names:
        program += refuse(_CALLS[name][column], errno.EPERM)
    program += [
        step(_EQUAL, _CLONE[column], 0, 3),
        step(_LOAD, _FIRST_ARGUMENT_AT),
        step(_ANY_BIT, _CLONE_ANY_NAMESPACE, 0, 1),
        step(_RETURN, _ERRNO | errno.EPERM),
        step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _leave_network(libc: ctypes.CDLL) -> None:
    if libc.unshare(_CLONE_NEWNET) != 0 and os.geteuid() != 0:
        # The kernel may forbid this. The process is still unprivileged then.
        libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)


ANSWER_CPU_S = 3
NUMBER_BYTES = 8


class AnswerFailed(Exception):
    """The process of an answer ended without a score."""


class AnswerTimedOut(AnswerFailed):
    """The process of an answer gave no score in time."""


def score_apart(score: Callable[[], float], limit_s: float) -> float:
    """Return the result of ``score``, called in a child process that is gone when this function returns.

    Args:
        score: computes the score; it may do anything.
        limit_s: seconds after which the child is killed.

    Raises:
        AnswerTimedOut: the child did not end within ``limit_s``.
        AnswerFailed: the child wrote anything but one number in [0, 1].

    Example:
        >>> score_apart(lambda: 0.25, 60.0)
        0.25
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _run(score, writer)
    os.close(writer)
    try:
        written = _read_to_end(reader, time.monotonic() + limit_s)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
    return _number(written)


def _run(score: Callable[[], float], writer: int) -> NoReturn:
    """Score in this process, which was forked for it, and end it."""
    try:
        give_up_the_rest(ANSWER_CPU_S)
        # Invariant: beside /dev/null, the answer's process has no descriptor but the pipe's end.
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, writer}:
            # The folder's own descriptor is closed already.
            with contextlib.suppress(OSError):
                os.close(descriptor)
        os.write(writer, struct.pack("<d", score()))
    finally:
        # An exception of the answer, even SystemExit, must not run what follows in the forked copy.
        os._exit(0)


def _read_to_end(reader: int, until: float) -> bytes:
    """Return what the child writes until it closes its end, but at most one byte more than a number has."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    written = b""
    while len(written) <= NUMBER_BYTES:
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise AnswerTimedOut("the answer's process gave no score in time")
        piece = os.read(reader, NUMBER_BYTES + 1 - len(written))
        if not piece:
            break
        written += piece
    return written


def _number(written: bytes) -> float:
    if len(written) != NUMBER_BYTES:
        raise AnswerFailed(f"the answer's process wrote {len(written)} bytes, expected {NUMBER_BYTES}")
    (score,) = struct.unpack("<d", written)
    if not (math.isfinite(score) and 0.0 <= score <= 1.0):
        raise AnswerFailed(f"the answer's process wrote {score!r}, expected a number in [0, 1]")
    return float(score)
