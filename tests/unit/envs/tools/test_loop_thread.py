"""Test that a coroutine that blocks its event loop is named, and stops no other tool."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from envs.errors import EnvError, ServiceFailed
from envs.tools import toolbox
from envs.tools.toolbox import LoopThread


@pytest.fixture
def loop():
    made = LoopThread()
    yield made
    made.close()


@pytest.fixture
def soon_blocked(monkeypatch):
    """A loop that does nothing else for a moment counts as blocked."""
    monkeypatch.setattr(toolbox, "TURN_S", 0.2)


async def seven():
    return 7


def test_a_coroutine_that_only_takes_long_is_cancelled_and_the_loop_stays(loop):
    before = loop.start(running()).result(60.0)
    with pytest.raises(TimeoutError, match=r"longer than 0\.1 s"):
        loop.call(asyncio.Event().wait(), 0.1)
    assert loop.start(running()).result(60.0) is before


def test_a_time_out_of_the_tools_own_is_its_own_error(loop):
    async def search():
        raise TimeoutError("the database did not answer")

    with pytest.raises(TimeoutError, match="the database did not answer"):
        loop.call(search(), 60.0)


async def running():
    return asyncio.get_running_loop()


@pytest.mark.usefixtures("soon_blocked")
def test_a_coroutine_that_blocks_is_named_by_its_line_and_later_calls_go_on(loop):
    free = threading.Event()

    async def search():
        free.wait()

    with pytest.raises(EnvError, match="the tool blocks all asynchronous tools at") as caught:
        loop.call(search(), 0.1)
    line = search.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} in search" in str(caught.value)
    assert loop.call(seven(), 60.0) == 7
    free.set()


@pytest.mark.usefixtures("soon_blocked")
def test_a_task_that_a_coroutine_started_blocks_in_its_name(loop):
    free = threading.Event()

    async def inner():
        free.wait()

    async def search():
        await asyncio.wait_for(inner(), 60.0)

    with pytest.raises(EnvError, match=r"the tool blocks all asynchronous tools at .* in inner"):
        loop.call(search(), 0.1)
    free.set()


@pytest.mark.usefixtures("soon_blocked")
def test_a_call_that_ends_with_its_loop_is_not_at_fault(loop):
    free, begun = threading.Event(), threading.Event()

    async def search():
        begun.set()
        free.wait()

    with ThreadPoolExecutor(2) as pool:
        blocking = pool.submit(loop.call, search(), 0.1)
        assert begun.wait(60.0)
        waiting = pool.submit(loop.call, asyncio.Event().wait(), 60.0)
        with pytest.raises(EnvError):
            blocking.result(60.0)
        free.set()
        with pytest.raises(ServiceFailed, match="this call was given up"):
            waiting.result(60.0)


@pytest.mark.usefixtures("soon_blocked")
def test_whoever_waits_behind_it_is_not_at_fault(loop):
    free, begun = threading.Event(), threading.Event()

    async def search():
        begun.set()
        free.wait()

    with ThreadPoolExecutor(1) as pool:
        blocking = pool.submit(loop.call, search(), 60.0)
        assert begun.wait(60.0)
        with pytest.raises(ServiceFailed, match=r"other code blocks all asynchronous tools at .* in search"):
            loop.call(seven(), 0.1)
        assert loop.call(seven(), 60.0) == 7
        free.set()
        blocking.result(60.0)
