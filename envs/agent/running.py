"""Starts code of the user, an agent or a scorer, where it cannot hold up others."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any, cast

from envs.errors import EnvError

CANCEL_S = 4.2
"""Longest time that an agent may take to end once its episode is over. A program takes up to 4 s."""


class RunningAgent:
    """The user's agent at work.

    Args:
        run: the agent.
        arguments: its arguments.
    """

    def __init__(self, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.work = started(run, arguments)

    @property
    def over(self) -> bool:
        """Whether it has ended, or was ended."""
        return self.work.done()

    @property
    def was_ended(self) -> bool:
        """Whether it was ended before it had returned."""
        return self.work.cancelled()

    def hand_over(self) -> None:
        """Let its task belong to the present call, so that code which blocks is blamed on this call."""
        present = asyncio.current_task()
        if hasattr(present, "call") and hasattr(self.work, "call"):
            cast(Any, self.work).call = cast(Any, present).call

    def check(self) -> None:
        """Raise the error of an agent that has ended with one.

        Raises:
            CancelledError: it was ended, or has cancelled itself.
        """
        self.work.result()

    def value(self) -> Any:
        """Return what it returned; None if it was ended, or raised an error."""
        work = self.work
        return work.result() if self.over and not self.was_ended and work.exception() is None else None

    async def end(self) -> None:
        """End it, and wait until it has ended."""
        if not self.over:
            self.work.cancel()
            await asyncio.wait({self.work}, timeout=CANCEL_S)
        if self.over and not self.was_ended:
            # Its error, if there is one, came of the end.
            self.work.exception()

    async def may_end(self, seconds: float) -> None:
        """Give it time to end by itself."""
        await asyncio.wait({self.work}, timeout=seconds)


def started(run: Callable[..., Any], arguments: tuple[Any, ...]) -> "asyncio.Future[Any]":
    """Start code of the user: a coroutine function in this event loop, a plain one in a thread of its own."""
    if inspect.iscoroutinefunction(run):
        started: asyncio.Future[Any] = asyncio.ensure_future(run(*arguments))
        return started
    return asyncio.ensure_future(_awaited(_in_thread(run, arguments)))


async def _awaited(started: "asyncio.Future[Any]") -> Any:
    """Return the result of a plain function, or of the coroutine that it returned."""
    value = await started
    return await value if inspect.isawaitable(value) else value


def _in_thread(run: Callable[..., Any], arguments: tuple[Any, ...]) -> "asyncio.Future[Any]":
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def set_result(value: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value, failed = None, None
        try:
            value = run(*arguments)
        except BaseException as error:
            failed = error if isinstance(error, Exception) else EnvError(f"the agent raised {error!r}")
        # The loop is closed if the actor has ended in the meantime.
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_result, value, failed)

    threading.Thread(target=work, name="agent", daemon=True).start()
    return done
