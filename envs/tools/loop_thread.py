"""An event loop in a thread of its own, for the coroutines of tools."""

import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any

from envs.blame import place_of_thread
from envs.errors import EnvError, ServiceFailed

JOIN_S = 5.0
"""Longest wait for the thread to end."""
TURN_S = 3.0
"""A loop that does nothing else for this long is blocked."""


class LoopThread:
    """Event loop that runs in a daemon thread from its first use until `close`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._calls = set[concurrent.futures.Future[Any]]()
        # Invariant: the loop and its thread are made under this lock, because episodes use threads of their own.
        self._lock = threading.Lock()

    def call(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Run a coroutine to its end, and return its result. Blocks.

        If a coroutine blocks the loop, later calls get a new loop in a new thread.

        Raises:
            TimeoutError: it took longer than ``timeout_s``. It was cancelled.
            EnvError: it blocks the loop; the text names the line.
            ServiceFailed: another coroutine blocks the loop; the text names the line.
            Exception: the coroutine's own errors.
        """
        future, loop, thread = self._start(work)
        self._calls.add(future)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise ServiceFailed(
                "other code blocked all asynchronous tools, and this call was given up"
            ) from None
        except concurrent.futures.TimeoutError:
            if future.done():
                # The coroutine's own error.
                raise
            future.cancel()
            if _turns(loop):
                raise TimeoutError(f"it took longer than {timeout_s:g} s") from None
            # Ask before others get a new loop, because the blocking code may go on at any time.
            current, place = asyncio.current_task(loop), place_of_thread(frame_of(thread))
            self._abandon(loop)
            what = f"blocks all asynchronous tools at {place}; await there, or make it a plain function"
            own = current is not None and current.get_coro() is work
            # A coroutine may also block in a task that it started itself.
            if own or self._calls == {future}:
                raise EnvError(f"the tool {what}") from None
            raise ServiceFailed(f"other code {what}") from None
        finally:
            self._calls.discard(future)

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._loop is loop:
                self._loop = self._thread = None
        # It ends if the blocking code ever does.
        loop.call_soon_threadsafe(loop.stop)

    def start(self, work: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        """Start a coroutine, and return the future of its result."""
        return self._start(work)[0]

    def _start(
        self, work: Coroutine[Any, Any, Any]
    ) -> "tuple[concurrent.futures.Future[Any], asyncio.AbstractEventLoop, threading.Thread]":
        with self._lock:
            if self._loop is None or self._thread is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), daemon=True, name="tools"
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop), self._loop, self._thread

    def close(self) -> None:
        """Cancel what still runs, and end the thread. Blocks for at most `JOIN_S`."""
        with self._lock:
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(JOIN_S)

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        for task in (tasks := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


def frame_of(thread: threading.Thread) -> FrameType | None:
    """Return the innermost frame of a thread; None if it has ended."""
    return sys._current_frames().get(thread.ident or 0)


def _turns(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a loop still runs callbacks. Blocks for at most `TURN_S`."""
    turned = threading.Event()
    loop.call_soon_threadsafe(turned.set)
    return turned.wait(TURN_S)
