"""Process in bubblewrap that runs programs which a model wrote, each test in processes of their own.

`envs.scoring.programs` starts it as ``python -m envs.scoring.program_worker``. It needs nothing but the standard
library, `confinement` and `program_process`, so nothing else has to be visible inside. Messages on stdin and stdout are
JSON, each after its 4-byte little-endian length. It gives up its rights before it reads a program, and the processes
that it starts give up more.
"""

import fcntl
import json
import math
import os
import resource
import select
import signal
import sys
import time
from typing import Any, BinaryIO, NoReturn

from envs.scoring import program_process
from envs.scoring.confinement import (
    CHILD_CALLS,
    PROGRAM_CALLS,
    die_with_parent,
    give_up_rights,
    inside_bubblewrap,
    refuse_calls,
)
from envs.scoring.program_process import CLOSE, TESTS_FD_VERDICTS, WHY_CHARS

MAX_JOB = 64 << 20
"""Longest message to a worker, in bytes."""
OUTPUT_SLACK = 64 << 10
"""Bytes that a program may print beyond twice what is expected."""
SHOWN_ERROR = 2_000
"""Bytes that are kept of what a program writes to stderr."""
OPEN_FILES, COPIES_FROM = 64, 64
NUMBER_CHARS = 64

PROBE = """
import os, socket
found = []
def can(what, attempt):
    try:
        attempt()
    except OSError:
        return
    found.append(what)
can("start processes", os.fork)
can("signal its parent", lambda: os.kill(os.getppid(), 0))
can("open sockets", socket.socket)
can("read /proc", lambda: os.listdir("/proc/1"))
for folder in ("/", "/tmp", "/dev/shm", "/dev", "/var/tmp"):
    can(f"write to {folder}", lambda: os.close(os.open(folder + "/file", os.O_CREAT | os.O_RDWR)))
can("make files in memory", lambda: os.memfd_create("file"))
print("; ".join(found) or "nothing")
"""
"""Program that says which rights it has. In a child of `os.fork` it prints, too."""


def equal_output(printed: str, expected: str) -> bool:
    """Return whether a program printed what was expected. White space does not count.

    Where the expected word is a decimal number with a point or an exponent, a number that differs by no more than
    `program_process.CLOSE`, relatively or absolutely, is equal to it.

    Example:
        >>> equal_output("1 2\\n", "1 2"), equal_output("0.3333333333\\n", "0.333333333"), equal_output("1 3", "1 2")
        (True, True, False)
    """
    words, wanted = printed.split(), expected.split()
    return len(words) == len(wanted) and all(map(_equal_word, words, wanted))


def _equal_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if len(word) > NUMBER_CHARS or not any(mark in wanted for mark in ".eE"):
        return False
    try:
        return math.isclose(float(word), float(wanted), rel_tol=CLOSE, abs_tol=CLOSE)
    except ValueError:
        return False


class Child:
    """A process of `program_process`, with its pipes.

    Args:
        mode: first argument of `program_process`.
        fed: what it reads from stdin.
        out: most bytes that are read from stdout; 0: stdout is /dev/null.
        pipes: further descriptors: those of the child by those of this process.
        cpu_s: CPU time after which the kernel kills it.
        memory_mb: largest address space.
    """

    def __init__(
        self, mode: str, fed: bytes, *, out: int, pipes: dict[int, int], cpu_s: int, memory_mb: int
    ) -> None:
        self._left, self._most = memoryview(fed), out
        self.printed, self.said = bytearray(), bytearray()
        self.too_much = False
        stdin, self._stdin = os.pipe()
        self._stdout, stdout = os.pipe()
        self._stderr, stderr = os.pipe()
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(mode, {0: stdin, 1: stdout if out else -1, 2: stderr, **pipes}, cpu_s, memory_mb)
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        for descriptor in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(descriptor, False)
        self._open = {self._stdin, self._stdout, self._stderr}

    def waits(self) -> dict[int, int]:
        """Return the events that the process is waited for with, by descriptor."""
        events = {self._stdin: select.POLLOUT, self._stdout: select.POLLIN, self._stderr: select.POLLIN}
        return {descriptor: event for descriptor, event in events.items() if descriptor in self._open}

    def turn(self, descriptor: int) -> None:
        """Write or read at a descriptor that is ready."""
        if descriptor == self._stdin:
            try:
                self._left = self._left[os.write(descriptor, self._left[:65_536]) :]
            except BrokenPipeError:
                # A program need not read all of its input.
                self._left = self._left[:0]
            if not self._left:
                self._close(descriptor)
            return
        piece = os.read(descriptor, 65_536)
        if not piece:
            self._close(descriptor)
        elif descriptor == self._stderr:
            # The end is kept, where the error stands.
            self.said = (self.said + piece)[-SHOWN_ERROR:]
        elif len(self.printed) + len(piece) > self._most:
            self.too_much = True
        else:
            self.printed += piece

    def end(self) -> int:
        """Kill the process if it lives, and return its status: negative for a signal."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            for descriptor in list(self._open):
                self._close(descriptor)
        return self.status

    def wait(self, until: float) -> bool:
        """Wait until the process has ended by itself. Return False if it has not at ``until``."""
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                for descriptor in list(self._open):
                    self._close(descriptor)
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.001)

    @property
    def output_open(self) -> bool:
        return not self._open.isdisjoint((self._stdout, self._stderr))

    def _close(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        os.close(descriptor)


def _become(mode: str, descriptors: dict[int, int], cpu_s: int, memory_mb: int) -> NoReturn:
    """Give up what a program does not need, and run `program_process` in this process."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        # Copies above all numbers that are wanted, so that none is overwritten before it is copied.
        held = {
            to: fcntl.fcntl(null if of < 0 else of, fcntl.F_DUPFD, COPIES_FROM)
            for to, of in descriptors.items()
        }
        for to, of in held.items():
            os.dup2(of, to)
        for number in range(max(held) + 1):
            if number not in held:
                os.dup2(null, number)
        os.closerange(max(held) + 1, COPIES_FROM + 3 * OPEN_FILES)
        limits = (
            (resource.RLIMIT_NPROC, 0),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_CPU, cpu_s),
            (resource.RLIMIT_AS, memory_mb << 20),
        )
        die_with_parent()
        for limit, value in limits:
            resource.setrlimit(limit, (value, value))
        refuse_calls((*CHILD_CALLS, *PROGRAM_CALLS))
        own = program_process.__file__
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-B", own, mode], _environment())
    except BaseException as error:
        os.write(2, f"no program was started: {type(error).__name__}: {error}".encode())
    finally:
        os._exit(127)


def _environment() -> dict[str, str]:
    return {"PATH": os.defpath, "PYTHONIOENCODING": "utf-8", "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}


def run_once(program: str, given: str, most: int, limits: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Run a program with an input. Return what it printed, and why it failed, or ""."""
    data = program.encode("utf-8", "replace")
    fed = len(data).to_bytes(4, "little") + data + given.encode("utf-8", "replace")
    until = time.monotonic() + limit_s
    child = Child("run", fed, out=most, pipes={}, cpu_s=math.ceil(limit_s), memory_mb=limits["memory_mb"])
    try:
        poll_until([child], until, lambda: child.too_much or not child.output_open)
        if child.too_much:
            why = f"it printed more than {most} bytes"
        elif child.output_open or not child.wait(until):
            why = TOO_SLOW.format(limit_s)
        else:
            why = _why_ended(child.status or 0, bytes(child.said))
    finally:
        child.end()
    return {"printed": child.printed.decode("utf-8", "replace"), "why": why, "said": _text(child.said)}


TOO_SLOW = "it did not end within {:g} s"


def _why_ended(status: int, said: bytes) -> str:
    if status == 0:
        return ""
    if status == -signal.SIGXCPU or status == -signal.SIGKILL:
        return "it used up its CPU time"
    last = _text(said).strip().rpartition("\n")[2]
    return f"it ended with status {status}{': ' if last else ''}{last}"[:WHY_CHARS]


def _text(said: bytes | bytearray) -> str:
    return said.decode("utf-8", "replace")


def poll_until(children: list[Child], until: float, done: Any) -> None:
    """Move data to and from children until ``done`` says so, or the time is over."""
    while not done():
        left = until - time.monotonic()
        waits = {
            descriptor: (child, event) for child in children for descriptor, event in child.waits().items()
        }
        if left <= 0 or not waits:
            return
        poll = select.poll()
        for descriptor, (_, event) in waits.items():
            poll.register(descriptor, event)
        for descriptor, _ in poll.poll(left * 1_000):
            if descriptor in waits[descriptor][0].waits():
                waits[descriptor][0].turn(descriptor)


def run_tests(job: dict[str, Any]) -> list[str]:
    """Return why each test of a program that reads and prints failed, "" for those that it passed."""
    whys, until = list[str](), time.monotonic() + job["total_s"]
    for test in job["tests"]:
        limit_s = min(job["limit_s"], until - time.monotonic())
        if limit_s <= 0 or (whys and whys[-1] and job["stop"]):
            whys.append("it was not tried")
            continue
        most = OUTPUT_SLACK + 2 * len(test["expected"].encode("utf-8", "replace"))
        done = run_once(job["program"], test["input"], most, job, limit_s)
        why = done["why"]
        if not why and not equal_output(done["printed"], test["expected"]):
            why = f"it printed {done['printed']!r:.80}, expected {test['expected']!r:.80}"
        whys.append(why)
    return whys


def call_tests(job: dict[str, Any]) -> list[str]:
    """Return why each test that calls functions of a program failed, "" for those that it passed.

    The tests go on with new processes behind one that takes too long, or that ends the program.
    """
    whys, until = list[str](), time.monotonic() + job["total_s"]
    while len(whys) < len(job["tests"]):
        if time.monotonic() >= until or (whys and whys[-1] and job["stop"]):
            whys.append("it was not tried")
            continue
        whys += _call_some(job, len(whys), until)
    return whys


def _call_some(job: dict[str, Any], first: int, until: float) -> list[str]:
    """Try tests from a number on, until one of them takes too long or the program has ended."""
    program = job["program"].encode("utf-8", "replace")
    tests = json.dumps({"tests": job["tests"][first:], "setup": job["imports"]}).encode()
    requests, ask = os.pipe()
    hear, replies = os.pipe()
    verdicts, say = os.pipe()
    cpu_s, memory = math.ceil(until - time.monotonic()) + 1, job["memory_mb"]
    server = Child(
        "serve",
        len(program).to_bytes(4, "little") + program,
        out=0,
        pipes={program_process.PROGRAM_FD_REQUESTS: requests, program_process.PROGRAM_FD_REPLIES: replies},
        cpu_s=cpu_s,
        memory_mb=memory,
    )
    tester = Child(
        "test",
        len(tests).to_bytes(4, "little") + tests,
        out=0,
        pipes={
            program_process.PROGRAM_FD_REQUESTS: ask,
            program_process.PROGRAM_FD_REPLIES: hear,
            TESTS_FD_VERDICTS: say,
        },
        cpu_s=cpu_s,
        memory_mb=memory,
    )
    for descriptor in (requests, ask, hear, replies, say):
        os.close(descriptor)
    whys = list[str]()
    read = bytearray()
    try:
        while first + len(whys) < len(job["tests"]) and not (whys and whys[-1] and job["stop"]):
            limit_s = min(job["limit_s"], until - time.monotonic())
            why, gone = _verdict([server, tester], verdicts, read, limit_s)
            whys.append(why)
            if gone:
                break
    finally:
        server.end()
        tester.end()
        os.close(verdicts)
    return whys


def _verdict(children: list[Child], verdicts: int, read: bytearray, limit_s: float) -> tuple[str, bool]:
    """Return the next verdict of the tests' process, and whether one of the processes is of no use any more."""
    until = time.monotonic() + limit_s
    while True:
        if len(read) >= 4 and len(read) >= 4 + (size := int.from_bytes(read[:4], "little")):
            said = json.loads(read[4 : 4 + size])
            del read[: 4 + size]
            return str(said["why"]), bool(said["gone"])
        poll = select.poll()
        poll.register(verdicts, select.POLLIN)
        owners = {descriptor: child for child in children for descriptor in child.waits()}
        for child in children:
            for descriptor, event in child.waits().items():
                poll.register(descriptor, event)
        left = until - time.monotonic()
        ready = poll.poll(left * 1_000) if left > 0 else []
        if not ready:
            return TOO_SLOW.format(limit_s), True
        for descriptor, _ in ready:
            if descriptor != verdicts:
                if descriptor in owners[descriptor].waits():
                    owners[descriptor].turn(descriptor)
                continue
            piece = os.read(verdicts, 65_536)
            if not piece:
                return "the test ended its process", True
            read += piece


def reply_to(job: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to one message."""
    match job["op"]:
        case "run":
            return run_once(job["program"], job["input"], job["most"], job, job["limit_s"])
        case "probe":
            done = run_once(PROBE, "", OUTPUT_SLACK, job, job["limit_s"])
            return {"can": done["printed"].strip(), "why": done["why"]}
        case "test":
            return {"whys": run_tests(job) if job["kind"] == "run" else call_tests(job)}
    raise ValueError(f"unknown operation {job['op']!r}")


def read_job(stream: BinaryIO) -> dict[str, Any] | None:
    """Read the next message. Return None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "little")
    if size > MAX_JOB:
        raise ValueError(f"a message of {size} bytes, at most {MAX_JOB}")
    job: dict[str, Any] = json.loads(stream.read(size))
    return job


def framed(message: dict[str, Any]) -> bytes:
    """Return the bytes of one message, with its length in front.

    Raises:
        ValueError: the message is too large.
    """
    payload = json.dumps(message).encode()
    if len(payload) > MAX_JOB:
        raise ValueError(f"a message of {len(payload)} bytes, at most {MAX_JOB}")
    return len(payload).to_bytes(4, "little") + payload


def main() -> None:
    die_with_parent()
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)

    def send(message: dict[str, Any]) -> None:
        sink.write(framed(message))
        sink.flush()

    if (job := read_job(source)) is None:
        return
    if job["bubblewrap"] and not inside_bubblewrap():
        send({"error": "the process was to run inside bubblewrap, but it sees the host"})
        return
    os.dup2(null, 2)
    give_up_rights(may_fork=True)
    send({"opened": True})
    while (job := read_job(source)) is not None:
        try:
            send(reply_to(job))
        except Exception as error:
            send({"error": f"{type(error).__name__}: {error}"[:500]})


if __name__ == "__main__":
    main()
