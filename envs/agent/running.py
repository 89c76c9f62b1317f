"""Starts code of the user, an agent or a scorer, where it cannot hold up others."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from envs.errors import EnvError


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
