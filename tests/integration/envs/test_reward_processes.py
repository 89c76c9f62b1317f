"""Test reward functions in processes of their own: signals, calls that never return, deaths, errors."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time

import pytest

from actors.environments import EnvironmentRunner
from actors.errors import EnvironmentFailed
from envs.errors import EnvError, ServiceFailed
from envs.registry import make_suite

REWARDS = """
import os, signal
from pathlib import Path
from envs.errors import ServiceFailed

def limited(completions, answer, **kwargs):
    # Signals can be set in a main thread only.
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(60)
    right = [float(c == a) for c, a in zip(completions, answer)]
    signal.alarm(0)
    return right

def odd(answer, row):
    if answer == "hang":
        Path("pid").write_text(str(os.getpid()))
        while True:
            pass
    if answer == "die":
        os._exit(3)
    if answer == "leave":
        raise SystemExit("enough")
    if answer == "busy":
        raise ServiceFailed("the checker is busy")
    if answer == "open":
        return open(__file__)
    return 1 / (len(answer) - 3)

def where(answer):
    return os.getpid()

async def waits(answer, row):
    return os.getpid()

def quits(answer, row):
    if answer == "go":
        os._exit(0)
    return 1.0
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Return a maker of suites with one process, in a folder with the rows and the functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)

    def make(reward, processes=1):
        params = {"train": "train.jsonl", "reward": reward, "heldout": 0, "processes": processes}
        return make_suite("rows", params)

    return make


def played(suite, *answers, timeout_s=120.0):
    """Answer the first task several times as an actor does. Return the results, or the errors in their place."""

    async def play():
        runner = EnvironmentRunner(calls=1)
        results = []
        try:
            for answer in answers:
                env = suite.episode()
                await env.reset({"index": 0, "split": "train"})
                limit_s = timeout_s if answer == "hang" else 120.0
                try:
                    results.append(await runner.call(env.step, answer, what="step", timeout_s=limit_s))
                except Exception as error:
                    results.append(error)
            await runner.call(suite.close, what="close", timeout_s=60.0)
        finally:
            runner.close()
        return results

    return asyncio.run(play())


def right_answer(suite):
    return suite.row(0, "train").values["answer"]


def test_a_function_that_sets_signals_runs_unchanged_in_a_process(suite):
    (in_thread,) = played(suite("rewards.py:limited", processes=0), "1")
    assert isinstance(in_thread, ValueError)
    assert "main thread" in str(in_thread)
    own = suite("rewards.py:limited")
    wrong, right = played(own, "x", right_answer(own))
    assert (wrong.rewards, wrong.correct) == ({"limited": 0.0}, False)
    assert (right.rewards, right.correct) == ({"limited": 1.0}, True)


def test_a_call_that_takes_too_long_ends_with_its_process(suite, tmp_path, caplog):
    before, stuck, after = played(suite("rewards.py:odd"), "four", "hang", "fives", timeout_s=10.0)
    assert before.rewards == {"odd": 1.0}
    assert isinstance(stuck, EnvironmentFailed)
    assert after.rewards == {"odd": 0.5}
    assert gone(int((tmp_path / "pid").read_text()))
    assert "rewards.py:14: odd: the process that ran it is ended" in caplog.text


def test_errors_name_file_and_line_and_the_next_call_works(suite):
    divided, died, left, busy, unsent, after = played(
        suite("rewards.py:odd"), "abc", "die", "leave", "busy", "open", "four"
    )
    assert isinstance(divided, EnvError)
    assert str(divided) == "rewards.py:27: ZeroDivisionError: division by zero"
    assert "in odd" in str(divided.__cause__)
    assert isinstance(died, EnvError)
    assert "rewards.py:14: odd: ProcessExpired" in str(died)
    assert str(left) == "rewards.py:22: SystemExit: enough"
    assert isinstance(busy, ServiceFailed)
    assert str(busy) == "the checker is busy"
    assert isinstance(unsent, EnvError)
    assert "rewards.py:14: odd" in str(unsent)
    assert after.rewards == {"odd": 1.0}


def test_a_process_that_ends_itself_as_if_all_was_well_is_noticed_at_once(suite):
    begun = time.monotonic()
    ended, after = played(suite("rewards.py:quits"), "go", "four")
    assert "quits: ProcessExpired" in str(ended)
    assert after.rewards == {"quits": 1.0}
    assert time.monotonic() - begun < 25, "it did not wait for the deadline"


def test_a_process_that_is_killed_between_two_calls_is_replaced(suite, tmp_path):
    own = suite("rewards.py:where")

    async def play():
        runner, pids = EnvironmentRunner(calls=1), []
        try:
            while len(pids) < 2:
                env = own.episode()
                await env.reset({"index": 0, "split": "train"})
                # The call that finds the process gone may fail.
                with contextlib.suppress(EnvError):
                    result = await runner.call(env.step, "a", what="step", timeout_s=120.0)
                    pids.append(int(result.rewards["where"]))
                    if len(pids) == 1:
                        os.kill(pids[0], signal.SIGKILL)
            await runner.call(own.close, what="close", timeout_s=60.0)
        finally:
            runner.close()
        return pids

    killed, other = asyncio.run(asyncio.wait_for(play(), 240))
    assert killed != other
    assert gone(other), "closing the suite ends its processes"


def test_an_asynchronous_function_stays_in_the_actor(suite):
    (result,) = played(suite("rewards.py:waits"), "a")
    assert result.rewards == {"waits": float(os.getpid())}


def test_a_number_of_processes_is_no_text_and_not_negative(suite):
    for wrong in (-1, "2", True):
        with pytest.raises(EnvError, match=r"params\.processes = "):
            suite("rewards.py:odd", processes=wrong)


def gone(pid):
    """Return whether a process has ended, or ends within a while."""
    until = time.monotonic() + 120.0
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
