"""An event loop in a thread of its own, for the coroutines of tools."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any

JOIN_S = 5.0
"""Longest wait for the thread to end."""


class LoopThread:
    """Event loop that runs in a daemon thread from its first use until `close`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # Invariant: the loop and its thread are made under this lock, because episodes use threads of their own.
        self._lock = threading.Lock()

    def call(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Run a coroutine to its end, and return its result. Blocks.

        Raises:
            TimeoutError: it took longer than ``timeout_s``. It was cancelled.
            Exception: the coroutine's own errors.
        """
        future = self.start(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TimeoutError(f"it took longer than {timeout_s:g} s") from None

    def start(self, work: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        """Start a coroutine, and return the future of its result."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), daemon=True, name="tools"
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

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
