"""Test that an answer's process has a pipe for one number, and nothing else."""

import os
import struct
import time

import pytest

from envs.scoring.confinement import AnswerFailed, AnswerTimedOut, score_apart

LIMIT_S = 60.0

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_what_a_score_changes_stays_in_its_process():
    seen = []

    def score():
        seen.append(os.getpid())
        return 0.5

    assert score_apart(score, LIMIT_S) == 0.5
    assert seen == []


@pytest.mark.parametrize("ending", [SystemExit(0), KeyboardInterrupt(), ValueError("answer")])
def test_an_exception_ends_only_the_answers_process(ending):
    def score():
        raise ending

    with pytest.raises(AnswerFailed, match="wrote 0 bytes"):
        score_apart(score, LIMIT_S)


@pytest.mark.parametrize("number", [1.5, -0.1, float("nan"), float("inf")])
def test_a_number_outside_zero_and_one_is_refused(number):
    with pytest.raises(AnswerFailed, match=r"expected a number in \[0, 1\]"):
        score_apart(lambda: number, LIMIT_S)


def test_a_second_number_is_refused():
    def score():
        for descriptor in range(3, 1_000):
            try:
                os.write(descriptor, struct.pack("<d", 1.0))
            except OSError:
                continue
        return 0.0

    with pytest.raises(AnswerFailed, match="wrote 9 bytes"):
        score_apart(score, LIMIT_S)


def test_a_process_that_stands_still_is_killed():
    before = time.monotonic()
    with pytest.raises(AnswerTimedOut):
        score_apart(lambda: time.sleep(600), 0.1)
    assert time.monotonic() - before < 300


def test_the_process_has_one_descriptor_beside_standard_streams(tmp_path):
    with open(tmp_path / "open", "w") as held:

        def score():
            return float(sum(_is_open(descriptor) for descriptor in range(3, 1_000)) == 1)

        assert score_apart(score, LIMIT_S) == 1.0
        assert not held.closed


def test_the_process_cannot_signal_or_make_sockets():
    def score():
        refused = 0
        for attempt in (lambda: os.kill(os.getppid(), 0), lambda: os.pidfd_open(os.getppid()), _socket):
            try:
                attempt()
            except PermissionError:
                refused += 1
        return refused / 4

    if not _filters():
        pytest.skip("this kernel or processor has no filter for system calls here")
    assert score_apart(score, LIMIT_S) == 0.75


def test_no_process_is_left(monkeypatch):
    started, fork = [], os.fork

    def noted():
        started.append(fork())
        return started[-1]

    monkeypatch.setattr(os, "fork", noted)
    score_apart(lambda: 0.5, LIMIT_S)
    (child,) = started
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


def _socket():
    import socket

    socket.socket()


def _is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _filters():
    """Return whether a process that gives up its rights cannot send signals."""

    def score():
        try:
            os.kill(os.getpid(), 0)
        except PermissionError:
            return 1.0
        return 0.0

    return score_apart(score, LIMIT_S) == 1.0
