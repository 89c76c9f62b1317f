"""Threads for the plain functions of environments. A thread that does not come back is left behind."""

import asyncio
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from actors.errors import EnvironmentFailed, EnvironmentStuck
from envs.blame import place_of_coroutine, place_of_error, place_of_thread

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
