"""Runs the code of environments away from the actor's event loop, so that code that blocks stops nothing else.

Coroutines run in an event loop of their own thread; plain functions run in further threads. Every call has a
deadline. A thread cannot be ended from outside, so a call that blocks past its deadline is left behind, and
its error names the line at which it stands.
"""

import asyncio
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

from actors.environments.worker_threads import EnvironmentCall, Raised, WorkerThreads, would_end
from actors.errors import EnvironmentFailed, EnvironmentStuck
from envs.blame import place_of_error, place_of_thread

log = logging.getLogger(__name__)

TICK_S = 0.25
BLOCKED_S = 2.0
"""Time without a tick after which the environments' event loop counts as blocked, and the log names the line."""
_CALL: ContextVar[EnvironmentCall | None] = ContextVar("call", default=None)
"""Call whose code runs."""


class _Task(asyncio.Task[Any]):
    """A task of the environments' loop. Its call is inherited by tasks that it begins, as `asyncio.gather` does."""

    call: EnvironmentCall | None = None


def _begin(loop: asyncio.AbstractEventLoop, work: Any, **settings: Any) -> _Task:
    task = _Task(work, loop=loop, **settings)
    task.call = _CALL.get(None)
    return task


class EnvironmentRunner:
    """Threads in which the code of environments runs.

    All methods are for one event loop, the actor's.

    Args:
        calls: plain functions that may run at the same time.

    Example:
        >>> async def main():
        ...     runner = EnvironmentRunner(calls=2)
        ...     try:
        ...         return await runner.call(str.upper, "a", what="upper", timeout_s=60.0)
        ...     finally:
        ...         runner.close()
        >>> asyncio.run(main())
        'A'
    """

    def __init__(self, *, calls: int) -> None:
        self._stage: _Stage | None = None
        self._threads = WorkerThreads(calls)
        self._warned = ""
        self.running = 0
        """Calls that have not ended, each within its deadline."""
        self.loops_left = 0
        """Event loops that were left behind. What belongs to them is of no use in the present one."""

    async def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        what: str,
        timeout_s: float,
        on_loop: bool = False,
    ) -> Any:
        """Call a function of an environment and return its result.

        Args:
            function: coroutine function, or plain function.
            what: words for errors: which function, for which task.
            timeout_s: seconds after which the call fails.
            on_loop: call a plain function in the environments' event loop. It must return at once.

        Raises:
            EnvironmentFailed: the call took longer than ``timeout_s``; the text names the line.
            EnvironmentStuck: code of a different call blocked the environments' event loop.
            Exception: the function's own errors.
        """
        until = time.monotonic() + timeout_s
        call = EnvironmentCall(what, until)
        self.running += 1
        try:
            if on_loop or inspect.iscoroutinefunction(function):
                return await self._on_loop(call, function, arguments, timeout_s)
            result = await self._in_thread(call, function, arguments, timeout_s)
            if not inspect.isawaitable(result):
                return result
            call.thread = 0
            return await self._on_loop(call, _await, (result,), timeout_s)
        finally:
            self.running -= 1

    @property
    def exhausted(self) -> str:
        """Why this process can call no plain function any more, and has to end; "" if it can."""
        return self._threads.exhausted

    def look(self) -> None:
        """Log the line at which code blocks the environments' event loop, once for each line."""
        stage = self._stage
        if (
            stage is None
            or (blocked_s := stage.blocked_s) < BLOCKED_S
            or (place := stage.place) == self._warned
        ):
            return
        self._warned = place
        call = stage.running_call()
        log.warning(
            "%s has stood for %.1f s in %s: all environments of this actor wait for it; make it a plain "
            "function (def), which runs in a thread, or await what it waits for",
            call.what if call else "an environment", blocked_s, place,
        )  # fmt: skip

    def close(self) -> None:
        """End the threads that can be ended. The others end with the process."""
        if self._stage is not None:
            self._stage.leave("the actor ends")
        self._threads.close()

    async def _on_loop(
        self,
        call: EnvironmentCall,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        timeout_s: float,
    ) -> Any:
        if self._stage is None:
            self._stage = _Stage()
        stage = self._stage
        waiting = stage.start(_invoke(call, function, arguments))
        try:
            await asyncio.wait({waiting}, timeout=call.until - time.monotonic())
        except asyncio.CancelledError:
            waiting.cancel()
            raise
        if waiting.cancelled():
            if stage.left:
                raise EnvironmentStuck(f"{call.what} was given up: {stage.left}")
            raise EnvironmentFailed(f"environment: {call.what} cancelled itself")
        if waiting.done():
            return _answer(waiting.result())
        place = call.place
        waiting.cancel()
        if stage is self._stage and stage.blocked_s > BLOCKED_S:
            culprit, place = stage.running_call(), stage.place
            what = culprit.what if culprit else "an environment"
            why = f"{what} blocked all environments of this actor for {stage.blocked_s:.0f} s in {place}"
            if culprit is None or time.monotonic() >= culprit.until:
                self._stage = None
                self.loops_left += 1
                stage.leave(why)
            if culprit is not call:
                raise EnvironmentStuck(f"{call.what} was given up: {why}")
        raise _took_longer(call.what, timeout_s, place)

    async def _in_thread(
        self,
        call: EnvironmentCall,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        timeout_s: float,
    ) -> Any:
        waiting = asyncio.wrap_future(self._threads.start(call, function, arguments))
        try:
            await asyncio.wait({waiting}, timeout=call.until - time.monotonic())
        except asyncio.CancelledError:
            self._threads.leave(call)
            raise
        if waiting.done():
            return _answer(waiting.result())
        place = call.place
        self._threads.leave(call)
        raise _took_longer(call.what, timeout_s, place)


class SuiteCaller:
    """Calls functions of one suite, and of episodes that began with it.

    Args:
        made_at: the runner's `loops_left` when the suite was made.
    """

    def __init__(self, runner: EnvironmentRunner, made_at: int) -> None:
        self._runner, self._made_at = runner, made_at

    async def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        what: str,
        timeout_s: float,
        on_loop: bool = False,
    ) -> Any:
        """Call a function, like `EnvironmentRunner.call`.

        Raises:
            EnvironmentStuck: the call failed, but began after the suite's event loop was left behind.
            Exception: the function's own errors.
        """
        orphan = self._runner.loops_left != self._made_at
        try:
            return await self._runner.call(
                function, *arguments, what=what, timeout_s=timeout_s, on_loop=on_loop
            )
        except Exception as error:
            if not orphan:
                raise
            why = "the event loop of its environment was left behind"
            raise EnvironmentStuck(f"{what} was given up: {why}: {error!r}") from error


def _took_longer(what: str, timeout_s: float, place: str) -> EnvironmentFailed:
    where = f"; it stands in {place}" if place else ""
    return EnvironmentFailed(f"environment: {what} took longer than env_timeout_s = {timeout_s:g} s{where}")


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


def _answer(result: Any) -> Any:
    """Return the result of a function, or raise its error."""
    if isinstance(result, Raised):
        raise result.error
    return result


async def _await(awaitable: Any) -> Any:
    return await awaitable


class _Stage:
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

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Future[Any]":
        """Run a coroutine in this thread. The future belongs to the loop of the caller."""
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
