"""A process of its own for one answer, so that an answer that runs as code meets no other answer.

`score_apart` forks the process that holds the questions. The child has a copy of the questions, /dev/null, and
a pipe for one number. It ends with its answer. What it changes in its own memory is lost with it.
"""

import contextlib
import math
import os
import select
import signal
import struct
import time
from collections.abc import Callable
from typing import NoReturn

from envs.scoring.confinement import give_up_the_rest

CPU_S = 3
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
        give_up_the_rest(CPU_S)
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
