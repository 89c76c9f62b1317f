"""Runs the code of environments away from the actor's event loop, so that code that blocks stops nothing else.

Coroutines run in an event loop of their own thread; plain functions run in further threads. Every call has a
deadline. A thread cannot be ended from outside, so a call that blocks past its deadline is left behind, and
its error names the line at which it stands.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import Callable
from typing import Any

from actors.environments.environment_loop import EnvironmentLoop
from actors.environments.worker_threads import EnvironmentCall, Raised, WorkerThreads
from actors.errors import EnvironmentFailed, EnvironmentStuck

log = logging.getLogger(__name__)

BLOCKED_S = 2.0
"""Time without a tick after which the environments' event loop counts as blocked, and the log names the line."""


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
        self._loop: EnvironmentLoop | None = None
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
        loop = self._loop
        if loop is None or (blocked_s := loop.blocked_s) < BLOCKED_S or (place := loop.place) == self._warned:
            return
        self._warned = place
        call = loop.running_call()
        log.warning(
            "%s has stood for %.1f s in %s: all environments of this actor wait for it; make it a plain "
            "function (def), which runs in a thread, or await what it waits for",
            call.what if call else "an environment", blocked_s, place,
        )  # fmt: skip

    def close(self) -> None:
        """End the threads that can be ended. The others end with the process."""
        if self._loop is not None:
            self._loop.leave("the actor ends")
        self._threads.close()

    async def _on_loop(
        self,
        call: EnvironmentCall,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        timeout_s: float,
    ) -> Any:
        if self._loop is None:
            self._loop = EnvironmentLoop()
        loop = self._loop
        waiting = loop.start(call, function, arguments)
        try:
            await asyncio.wait({waiting}, timeout=call.until - time.monotonic())
        except asyncio.CancelledError:
            waiting.cancel()
            raise
        if waiting.cancelled():
            if loop.left:
                raise EnvironmentStuck(f"{call.what} was given up: {loop.left}")
            raise EnvironmentFailed(f"environment: {call.what} cancelled itself")
        if waiting.done():
            return _answer(waiting.result())
        place = call.place
        waiting.cancel()
        if loop is self._loop and loop.blocked_s > BLOCKED_S:
            culprit, place = loop.running_call(), loop.place
            what = culprit.what if culprit else "an environment"
            why = f"{what} blocked all environments of this actor for {loop.blocked_s:.0f} s in {place}"
            if culprit is None or time.monotonic() >= culprit.until:
                self._loop = None
                self.loops_left += 1
                loop.leave(why)
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


def _answer(result: Any) -> Any:
    """Return the result of a function, or raise its error."""
    if isinstance(result, Raised):
        raise result.error
    return result


async def _await(awaitable: Any) -> Any:
    return await awaitable
