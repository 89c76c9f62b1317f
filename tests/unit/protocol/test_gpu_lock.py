"""The lock on shared GPUs: who may hold it beside whom, and what happens when a holder is killed."""

import multiprocessing
import os
import signal

import pytest

from protocol.processes import VARIABLE, GpuLock, lock_of_environment

LIMIT_S = 20.0


def take(lock, alone):
    return lock.take_alone() if alone else lock.take_together()


def hold(folder, alone, ready):
    lock = GpuLock(folder)
    assert take(lock, alone)
    ready.set()
    signal.pause()


@pytest.mark.parametrize("alone", [True, False])
def test_a_killed_process_holds_nothing(tmp_path, alone):
    """Whether the learner is killed in its update, or a generator while it is awake."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path, alone, ready))
    process.start()
    try:
        assert ready.wait(LIMIT_S)
        other = GpuLock(tmp_path)
        assert not take(other, not alone)
        os.kill(process.pid, signal.SIGKILL)
        process.join(LIMIT_S)
        assert take(other, not alone)
    finally:
        process.kill()


def test_generators_hold_it_together_and_nobody_new_beside_one_who_wants_it_alone(tmp_path):
    one, two, late, learner = (GpuLock(tmp_path) for _ in range(4))
    assert one.take_together()
    assert two.take_together()
    seen = []

    def look(seconds):
        seen.append((one.wanted_alone(), late.take_together(), learner.take_alone()))

    with pytest.raises(TimeoutError):
        learner.wait_alone(1.0, clock=iter([0.0, 0.5, 1.5]).__next__, sleep=look)
    assert seen == [(True, False, False)]
    # Who has given up no longer keeps others away.
    assert not one.wanted_alone()
    assert late.take_together()
    for lock in (one, two):
        lock.release()
    assert not learner.take_alone()
    late.release()
    assert learner.wait_alone(1.0) >= 0.0
    assert not one.take_together()
    learner.release()
    assert one.take_together()


def test_what_is_released_twice_or_closed_is_free(tmp_path):
    one, other = GpuLock(tmp_path), GpuLock(tmp_path)
    one.release()
    assert one.take_alone()
    one.close()
    assert other.take_alone()


def test_a_process_without_the_variable_shares_no_gpu(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert lock_of_environment() is None
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gpu-lock"))
    first, second = lock_of_environment(), lock_of_environment()
    assert first.take_alone()
    assert not second.take_together()
