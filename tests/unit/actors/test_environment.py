"""Test the threads in which environments run: code that blocks is named, and stops nothing else."""

import asyncio
import contextlib
import threading

import pytest

from actors import environments
from actors import environments as environment
from actors.environments import EnvironmentRunner, SuiteCaller
from actors.errors import EnvironmentFailed, EnvironmentStuck

LONG_S = 60.0


def with_runner(main, **settings):
    async def run():
        runner = EnvironmentRunner(**({"calls": 2} | settings))
        try:
            return await main(runner)
        finally:
            runner.close()

    return asyncio.run(run())


def test_functions_and_coroutines_return_their_results_and_raise_their_errors():
    async def double(number):
        await asyncio.sleep(0)
        return 2 * number

    def missing():
        return {}["answer"]

    async def main(runner):
        assert await runner.call(double, 3, what="double", timeout_s=LONG_S) == 6
        assert await runner.call(lambda: double(4), what="a coroutine", timeout_s=LONG_S) == 8
        with pytest.raises(KeyError, match="answer"):
            await runner.call(missing, what="missing", timeout_s=LONG_S)
        assert runner.running == 0

    with_runner(main)


def test_a_function_that_blocks_delays_neither_the_loop_nor_others():
    blocked, free = threading.Event(), threading.Event()

    def block():
        blocked.set()
        assert free.wait(LONG_S)
        return "free"

    async def quick():
        return "quick"

    async def main(runner):
        waiting = asyncio.create_task(runner.call(block, what="block", timeout_s=LONG_S))
        assert await asyncio.to_thread(blocked.wait, LONG_S)
        assert await runner.call(quick, what="quick", timeout_s=LONG_S) == "quick"
        assert await runner.call(str.upper, "a", what="upper", timeout_s=LONG_S) == "A"
        free.set()
        assert await waiting == "free"

    with_runner(main)


def test_calls_beyond_the_threads_wait_and_those_left_behind_are_replaced():
    free = threading.Event()

    async def main(runner):
        for _ in range(2):
            with pytest.raises(
                EnvironmentFailed, match=r"wait took longer than env_timeout_s = 0.05 s; .* in "
            ):
                await runner.call(free.wait, LONG_S, what="wait", timeout_s=0.05)
        assert await runner.call(str.upper, "a", what="upper", timeout_s=LONG_S) == "A"
        free.set()

    with_runner(main, calls=1)


def test_too_many_calls_that_never_end_are_refused_with_an_example(monkeypatch):
    monkeypatch.setattr(environments, "MAX_LEFT_BEHIND", 1)
    free = threading.Event()

    def forever():
        free.wait(LONG_S)

    async def main(runner):
        with pytest.raises(EnvironmentFailed):
            await runner.call(forever, what="forever", timeout_s=0.05)
        assert "1 calls never ended, for example forever in " in runner.exhausted
        with pytest.raises(EnvironmentStuck, match=r"upper was given up: 1 calls never ended, .* in forever"):
            await runner.call(str.upper, "a", what="upper", timeout_s=LONG_S)
        free.set()

    with_runner(main)


def test_a_coroutine_that_blocks_is_named_by_call_and_line_and_the_others_are_given_back(monkeypatch, caplog):
    monkeypatch.setattr(environment, "BLOCKED_S", 0.3)
    blocked, free = threading.Event(), threading.Event()

    async def culprit():
        blocked.set()
        free.wait(LONG_S)

    async def victim():
        return "never"

    async def main(runner):
        first = asyncio.create_task(runner.call(culprit, what="step of t.1", timeout_s=1.0))
        assert await asyncio.to_thread(blocked.wait, LONG_S)
        second = asyncio.create_task(runner.call(victim, what="step of t.2", timeout_s=LONG_S))
        place = f"{__file__}:{culprit.__code__.co_firstlineno + 2} in culprit"
        while not caplog.records:
            runner.look()
            await asyncio.sleep(0.01)
        assert "step of t.1 has stood for" in caplog.text
        assert place in caplog.text
        with pytest.raises(EnvironmentFailed, match=r"step of t.1 took longer") as failed:
            await first
        assert place in str(failed.value)
        with pytest.raises(EnvironmentStuck, match=r"step of t.2 was given up: step of t.1 blocked all"):
            await second
        assert await runner.call(victim, what="step of t.3", timeout_s=LONG_S) == "never"
        free.set()

    with_runner(main)


def test_a_call_is_at_fault_for_what_blocks_in_tasks_that_it_has_begun(monkeypatch):
    monkeypatch.setattr(environment, "BLOCKED_S", 0.1)
    free = threading.Event()

    async def block():
        free.wait(LONG_S)

    async def culprit():
        await asyncio.gather(block())

    async def main(runner):
        with pytest.raises(EnvironmentFailed, match=r"step took longer than .* in block"):
            await runner.call(culprit, what="step", timeout_s=0.5)
        free.set()

    with_runner(main)


def test_a_short_call_does_not_end_a_coroutine_that_blocks_within_its_own_deadline(monkeypatch):
    monkeypatch.setattr(environment, "BLOCKED_S", 0.1)
    blocked, free = threading.Event(), threading.Event()

    async def slow():
        blocked.set()
        free.wait(LONG_S)
        return "done"

    async def main(runner):
        first = asyncio.create_task(runner.call(slow, what="slow", timeout_s=LONG_S))
        assert await asyncio.to_thread(blocked.wait, LONG_S)
        with pytest.raises(EnvironmentStuck, match="slow blocked all environments"):
            await runner.call(dict, what="gauges", timeout_s=0.5, on_loop=True)
        free.set()
        assert await first == "done"

    with_runner(main)


def test_code_that_would_end_the_process_fails_its_call_only():
    async def leave():
        raise SystemExit(3)

    def interrupt():
        raise KeyboardInterrupt

    async def main(runner):
        for function, said in ((leave, r"SystemExit\(3\)"), (interrupt, r"KeyboardInterrupt\(\)")):
            with pytest.raises(EnvironmentFailed, match=said):
                await runner.call(function, what="step", timeout_s=LONG_S)

    with_runner(main)


def test_a_task_that_would_end_the_process_does_not_end_the_environments_loop():
    async def leave():
        raise SystemExit(3)

    async def step():
        task = asyncio.create_task(leave())
        await asyncio.wait({task})
        return task.exception().code

    async def main(runner):
        assert await runner.call(step, what="step", timeout_s=LONG_S) == 3

    with_runner(main)


def test_what_fails_because_its_loop_was_left_behind_is_nobodys_fault(monkeypatch):
    monkeypatch.setattr(environment, "BLOCKED_S", 0.1)
    free, state = threading.Event(), {}

    async def reset():
        state["answers"] = asyncio.Queue()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(state["answers"].get(), 0.01)

    async def block():
        free.wait(LONG_S)

    async def step():
        await asyncio.wait_for(state["answers"].get(), LONG_S)

    async def main(runner):
        old = SuiteCaller(runner, runner.loops_left)
        await old.call(reset, what="reset", timeout_s=LONG_S)
        with pytest.raises(EnvironmentFailed, match="block took longer"):
            await old.call(block, what="block", timeout_s=0.5)
        with pytest.raises(EnvironmentStuck, match=r"was left behind: .* bound to a different event loop"):
            await old.call(step, what="step", timeout_s=LONG_S)
        assert await old.call(str.upper, "a", what="upper", timeout_s=LONG_S) == "A"
        with pytest.raises(RuntimeError, match="bound to a different event loop"):
            await SuiteCaller(runner, runner.loops_left).call(step, what="step", timeout_s=LONG_S)
        free.set()

    with_runner(main)
