"""Runs the code of environments in threads of its own, so that code that blocks stops nothing else in the actor.

A call goes from `EnvironmentRunner` to a thread of `WorkerThreads` (plain functions) or to the thread of
`EnvironmentLoop` (coroutines). `LiveSuite` holds the actor's suite, and makes it anew when it hangs.
"""

import asyncio
import inspect
import logging
import queue
import sys
import threading
import time
from bdb import BdbQuit
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from actors.errors import EnvironmentFailed, EnvironmentStuck
from envs.base import HasGauges, Suite
from envs.user_code import place_of_coroutine, place_of_error, place_of_thread
from protocol.gauges import ENV
from protocol.processes import end_loop

log = logging.getLogger(__name__)

MAX_LEFT_BEHIND = 64
"""Upper limit of the threads that were left behind because a function in them does not end."""


@dataclass(frozen=True)
class Raised:
    """An error of an environment's function. Futures would replace some errors by copies without traceback."""

    error: Exception


@dataclass(eq=False)
class EnvironmentCall:
    """One call of an environment's function. The main thread reads what the thread that runs it wrote."""

    what: str
    until: float
    """Monotonic time after which the call has failed."""
    task: "asyncio.Task[Any] | None" = None
    """Task in the environments' loop that runs the call."""
    thread: int = 0
    """Thread that runs the call if it is a plain function."""

    @property
    def place(self) -> str:
        """Line at which the call stands now; "" if it is not known."""
        if self.thread:
            return place_of_thread(sys._current_frames().get(self.thread))
        return place_of_coroutine(self.task.get_coro()) if self.task is not None else ""


def would_end(call: EnvironmentCall, error: BaseException) -> EnvironmentFailed:
    """Return the error for code that would end the process, such as ``sys.exit()``."""
    return EnvironmentFailed(f"environment: {call.what} raised {error!r} in {place_of_error(error)}")


_Work = tuple[EnvironmentCall, Callable[..., Any], tuple[Any, ...], "Future[Any]"]
"""A call, its function and arguments, and the future of its result."""


class WorkerThreads:
    """Daemon threads for plain functions. The pool of `concurrent.futures` would wait for them at the end."""

    def __init__(self, calls: int) -> None:
        self._limit = calls
        self._idle: deque[queue.SimpleQueue[_Work | None]] = deque()
        """Inboxes of the threads that wait for work."""
        self._count = 0
        self._left: set[EnvironmentCall] = set()
        self._waiting: deque[_Work] = deque()
        # Invariant: workers and the actor's thread change all of these under this lock.
        self._lock = threading.Lock()
        self._closed = False

    @property
    def exhausted(self) -> str:
        """Why no function can be started any more; "" if one can."""
        left = list(self._left)
        if len(left) < MAX_LEFT_BEHIND:
            return ""
        return f"{len(left)} calls never ended, for example {left[0].what} in {left[0].place}"

    def start(
        self, call: EnvironmentCall, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> "Future[Any]":
        """Run a function in a thread, as soon as one is free.

        Raises:
            EnvironmentStuck: too many threads were left behind.
        """
        done: Future[Any] = Future()
        work = (call, function, arguments, done)
        with self._lock:
            if why := self.exhausted:
                raise EnvironmentStuck(f"{call.what} was given up: {why}")
            if self._idle:
                self._idle.popleft().put(work)
            elif self._count < self._limit + len(self._left):
                self._count += 1
                inbox = queue.SimpleQueue[_Work | None]()
                inbox.put(work)
                threading.Thread(target=self._work, args=(inbox,), name="environment", daemon=True).start()
            else:
                self._waiting.append(work)
        return done

    def leave(self, call: EnvironmentCall) -> None:
        """Leave a call behind: another thread may run in its place."""
        with self._lock:
            if call.thread:
                self._left.add(call)
            else:
                self._waiting = deque(work for work in self._waiting if work[0] is not call)

    def close(self) -> None:
        """End the threads that wait for work."""
        with self._lock:
            self._closed = True
            for inbox in self._idle:
                inbox.put(None)

    def _work(self, inbox: "queue.SimpleQueue[_Work | None]") -> None:
        """Run one function after the other, in a thread of its own."""
        while (work := inbox.get()) is not None:
            call, function, arguments, done = work
            call.thread = threading.get_ident()
            try:
                result = function(*arguments)
            except Exception as error:
                result = Raised(error)
            except BaseException as error:
                result = Raised(would_end(call, error))
            # The caller may have given the call up.
            if done.set_running_or_notify_cancel():
                done.set_result(result)
            call.thread = 0
            if not self._next(inbox, call):
                return

    def _next(self, inbox: "queue.SimpleQueue[_Work | None]", call: EnvironmentCall) -> bool:
        """Give a thread its next work, or let it wait; return False if it has to end."""
        with self._lock:
            self._left.discard(call)
            if self._closed or self._count > self._limit + len(self._left):
                self._count -= 1
                return False
            if self._waiting:
                inbox.put(self._waiting.popleft())
            else:
                self._idle.append(inbox)
            return True


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
        end_loop(self._loop)

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


class CallsHere(EnvironmentRunner):
    """Runs the code of environments in the caller's thread and event loop, so that a debugger stops in it.

    There are no deadlines: a function that does not return stops everything.
    """

    def __init__(self) -> None:
        super().__init__(calls=1)

    async def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        what: str,
        timeout_s: float,
        on_loop: bool = False,
    ) -> Any:
        """Call a function of an environment and return its result, like `EnvironmentRunner.call`.

        Raises:
            KeyboardInterrupt: the person at the debugger wants to end.
            Exception: the function's own errors.
        """
        self.running += 1
        try:
            result = function(*arguments)
            return await result if inspect.isawaitable(result) else result
        except BdbQuit:
            # Otherwise it would count as an error of the environment, and the run would go on.
            raise KeyboardInterrupt from None
        finally:
            self.running -= 1


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


CLOSE_S = 10.0
REMAKE_S = 120.0
"""Longest time for making the suite anew after code has blocked the thread of the environments."""


class LiveSuite:
    """The suite, made at once. All methods are for the actor's event loop.

    Args:
        make: makes the suite again if code has blocked the environments' thread.
        suite: the suite, if it is made already; None: `make` is called at once.
        calls: plain functions that may run at the same time.
        timeout_s: longest time that the suite may take to report its gauges.
        on_failure: called with the reason if the suite cannot be made anew, or too many calls never end.
        environments: runs the suite's code; None: threads do.
    """

    def __init__(
        self,
        make: Callable[[], Suite],
        *,
        suite: Suite | None = None,
        calls: int,
        timeout_s: float,
        on_failure: Callable[[str], None],
        environments: EnvironmentRunner | None = None,
    ) -> None:
        self._make, self._timeout_s, self._on_failure = make, timeout_s, on_failure
        self._suite = make() if suite is None else suite
        self.environments = environments or EnvironmentRunner(calls=calls)
        self.gauges: dict[str, float] = {}
        """Gauges of the suite, as it last reported them."""
        self._made_at = 0
        """Value of the runner's `loops_left` when the suite was made."""
        self._remaking: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Name code that blocks, and ask for gauges. Call it about once a second."""
        self.environments.look()
        if why := self.environments.exhausted:
            # Every episode would fail here at once, and so take tasks from actors that can run them.
            self._on_failure(f"environment: {why}")
        if isinstance(self._suite, HasGauges) and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read_gauges(self._suite), name="gauges of the suite")

    async def ready(self) -> tuple[Suite, SuiteCaller]:
        """Return the suite, and what calls its code.

        Make it anew first if the old one belongs to an event loop that was left behind.
        """
        while self._made_at != self.environments.loops_left:
            if self._remaking is None:
                self._remaking = asyncio.create_task(self._remake(), name="make the suite anew")
            # The suite is for all episodes, so the end of one that waits for it must not end its making.
            await asyncio.shield(self._remaking)
        return self._suite, SuiteCaller(self.environments, self._made_at)

    async def close(self) -> None:
        """Close the suite and end its threads."""
        if self._closing is not None:
            await self._closing
        await self._close_suite(self._suite)
        self.environments.close()

    async def _read_gauges(self, suite: HasGauges) -> None:
        """Read the gauges of the suite. An error in them must not stop the actor."""
        try:
            gauges = await self.environments.call(
                suite.gauges, what="gauges", timeout_s=self._timeout_s, on_loop=True
            )
            self.gauges = {f"{ENV}{name}": float(value) for name, value in gauges.items()}
        except Exception as error:
            log.warning("gauges of the environment: %r", error)

    async def _remake(self) -> None:
        loops_left, old = self.environments.loops_left, self._suite
        try:
            self._suite = await self.environments.call(
                self._make, what="making the environment anew", timeout_s=REMAKE_S
            )
        except Exception as error:
            self._on_failure(f"the environment could not be made anew: {error}")
        finally:
            self._made_at, self._remaking = loops_left, None
        if self._suite is not old:
            # Its processes and connections must not stay. Episodes do not wait for that.
            self._closing = asyncio.create_task(self._close_suite(old), name="close the old suite")

    async def _close_suite(self, suite: Suite) -> None:
        try:
            await self.environments.call(suite.close, what="close", timeout_s=CLOSE_S)
        except Exception as error:
            log.error("the environment did not close: %s", error)
