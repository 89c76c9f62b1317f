"""One process: what it refuses, and a clock that stands while a person is in a debugger."""

import asyncio
import bdb
import io
import pdb  # a debugger with keys of the test
import signal
import sys
import time
from pathlib import Path

import pytest

import protocol.direct
from launch import cli
from launch.cli import breakpoints_left_out
from launch.errors import ConfigError
from launch.in_process import Roles, loop_of_all_roles, quitting_ends, refuse, usual_signals
from launch.run_file.load import check
from learner.process import Stop

JOB = {"model": {"path": "m"}, "env": {"name": "calculator"}}


def job(**sections):
    return check({**JOB, **sections}, "a test")


def test_a_usual_job_may_be_in_one_process():
    refuse(job())


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"learner": {"processes": 2}}, "learner.processes=1"),
        ({"learner": {"nodes": 2, "rendezvous": "tcp://h:1"}}, "learner.nodes=1"),
        ({"generator": {"tensor_parallel_size": 2}}, "generator.tensor_parallel_size=1"),
        ({"generator": {"endpoint": "tcp://0.0.0.0:0"}}, "generator.endpoint = tcp://0.0.0.0:0"),
        ({"broker": {"endpoint": "tcp://10.0.0.1:5755"}}, "other hosts cannot take part"),
        ({"weights": {"http": "0.0.0.0:5757"}}, "weights.http = 0.0.0.0:5757"),
        ({"env": {"name": "calculator", "params": {"processes": 2}}}, "env.params.processes=0"),
    ],
)
def test_what_one_process_cannot_be_is_refused_with_its_cure(sections, why):
    with pytest.raises(ConfigError, match="--in-process") as refused:
        refuse(job(**sections))
    assert why in str(refused.value)


def test_all_reasons_are_told_at_once():
    with pytest.raises(ConfigError) as refused:
        refuse(job(learner={"processes": 2}, generator={"tensor_parallel_size": 2}))
    assert "learner.processes" in str(refused.value)
    assert "tensor_parallel_size" in str(refused.value)


def test_a_journal_in_memory_is_for_one_process_only(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "spell_backward", "--journal", "memory"])
    assert "--journal memory is for --in-process" in capsys.readouterr().err


def test_no_deadline_passes_while_a_turn_of_the_loop_takes_long(monkeypatch):
    monkeypatch.setattr("launch.in_process.LONGEST_TURN_S", 0.05)
    usual = time.monotonic
    with loop_of_all_roles() as loop:

        async def stop_in_a_debugger():
            before = time.monotonic()
            await asyncio.sleep(0)
            time.sleep(1.5)  # noqa: ASYNC251  # a person looks at variables
            await asyncio.sleep(0)
            return time.monotonic() - before

        async def in_time():
            async with asyncio.timeout(1.0):
                return await stop_in_a_debugger()

        began = time.monotonic()
        assert loop.run_until_complete(in_time()) < 1.0
        # The learner, outside the loop, does not count what a person took inside it.
        assert time.monotonic() - began < 1.2
        before = loop.time()
        began = time.monotonic()
        time.sleep(0.2)
        # But it counts its own steps, which the roles do not notice.
        assert time.monotonic() - began >= 0.2
        assert loop.run_until_complete(asyncio.sleep(0, True))
        assert loop.time() - before < 0.2
    assert time.monotonic is usual


def test_q_at_the_debugger_ends_the_run_in_the_handler_of_a_message(monkeypatch):
    """A handler goes on after each Exception, so q would lose the message and go on."""
    debugger = pdb.Pdb(stdin=io.StringIO("q\n"), stdout=io.StringIO(), readrc=False)

    def handle(frames):
        debugger.set_trace()
        return frames

    usual, traced = bdb.BdbQuit, sys.gettrace()
    try:
        with quitting_ends(), pytest.raises(KeyboardInterrupt):
            protocol.direct._guarded(handle, [])
    finally:
        sys.settrace(traced)
    assert bdb.BdbQuit is usual


def test_the_first_interrupt_is_the_learners_and_the_second_ends_what_runs(tmp_path):
    said, before = [], signal.getsignal(signal.SIGINT)
    with usual_signals():
        roles, stop = Roles(job(), tmp_path, "m", "memory", None, said.append), Stop()
        roles._count_interrupts()
        signal.raise_signal(signal.SIGINT)
        assert stop.reason() == "SIGTERM"
        assert roles.interrupted
        assert "a second Ctrl-C ends it at once" in said[0]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_trial_of_an_environment_leaves_its_breakpoints_out(monkeypatch):
    stopped = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped.append(1))
    with breakpoints_left_out():
        breakpoint()
    assert not stopped
    breakpoint()
    assert stopped


def test_the_names_of_the_page_on_debugging_exist():
    """tests/e2e/test_in_process.py runs the blocks; this finds a renamed function within a second."""
    page = (Path(__file__).parents[3] / "docs" / "extend" / "debugging.md").read_text()
    code = [line for line in page.splitlines() if line.startswith("from ")]
    assert len(code) > 6
    names: dict[str, object] = {}
    exec("\n".join(code), names)
    for line in page.splitlines():
        if line.startswith("tbreak "):
            eval(line.removeprefix("tbreak "), names)
