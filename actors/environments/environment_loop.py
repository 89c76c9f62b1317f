"""The thread with the event loop in which the coroutines of environments run, and which call's code it executes."""

import asyncio
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from actors.environments.worker_threads import EnvironmentCall, Raised, would_end
from envs.blame import place_of_error, place_of_thread

log = logging.getLogger(__name__)

TICK_S = 0.25
_CALL: ContextVar[EnvironmentCall | None] = ContextVar("call", default=None)
"""Call whose code runs."""


class _Task(asyncio.Task[Any]):
    """A task of the environments' loop. Its call is inherited by tasks that it begins, as `asyncio.gather` does."""

    call: EnvironmentCall | None = None


def _begin(loop: asyncio.AbstractEventLoop, work: Any, **settings: Any) -> _Task:
    task = _Task(work, loop=loop, **settings)
    task.call = _CALL.get(None)
    return task


class EnvironmentLoop:
    """A thread with an event loop for the coroutines of environments."""

    def __init__(self) -> None:
        self.left = ""
        """Reason why this thread was left behind; "" while it is in use."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(_begin)
        self._ticked = time.monotonic()
        self._calls = set[asyncio.Future[Any]]()
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    @property
    def blocked_s(self) -> float:
        """Seconds for which the loop has not come back to its next step."""
        return time.monotonic() - self._ticked

    @property
    def place(self) -> str:
        """Line that the thread executes now."""
        return place_of_thread(sys._current_frames().get(self._thread.ident or 0))

    def running_call(self) -> EnvironmentCall | None:
        """Return the call whose code the thread executes now, if it is known."""
        task = asyncio.current_task(self._loop)
        return task.call if isinstance(task, _Task) else None

    def start(
        self, call: EnvironmentCall, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> "asyncio.Future[Any]":
        """Run a function in this thread, and await what it returns. The future belongs to the loop of the caller.

        It holds `Raised` if the function has failed.
        """
        work = _invoke(call, function, arguments)
        waiting = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        self._calls.add(waiting)
        waiting.add_done_callback(self._calls.discard)
        return waiting

    def leave(self, why: str) -> None:
        """Give up all calls, and end the thread as soon as its code lets it."""
        self.left = why
        for waiting in list(self._calls):
            waiting.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._tick()
        while not self.left:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # The loop passes these on from a task that a call has begun. They must end neither it nor the thread.
                log.warning("a task of an environment raised %r in %s", error, place_of_error(error))
        # What was cancelled gets its chance to clean up.
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _tick(self) -> None:
        # Invariant: the actor's thread only reads this number.
        self._ticked = time.monotonic()
        self._loop.call_later(TICK_S, self._tick)


async def _invoke(call: EnvironmentCall, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    call.task = task = asyncio.current_task()
    assert isinstance(task, _Task)
    task.call = call
    _CALL.set(call)
    try:
        result = function(*arguments)
        return await result if inspect.isawaitable(result) else result
    except Exception as error:
        return Raised(error)
    except (SystemExit, KeyboardInterrupt) as error:
        return Raised(would_end(call, error))
