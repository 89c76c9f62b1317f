"""Processes for reward functions that must not run in a thread of the actor.

Some functions work in a main thread only, because they set signals. Others compute without a pause, which would
stop the actor's other threads. A process can be ended, so a function that hangs is gone with its process.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from envs.blame import in_one_line
from envs.errors import EnvError, ServiceFailed
from envs.rows.reward_functions import RewardFunction
from envs.user_code import load_callable
from protocol.processes import die_with_parent

if TYPE_CHECKING:
    from pebble import ProcessPool

log = logging.getLogger(__name__)

STOP_S = 5.0
"""Longest wait for the processes to end."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""Functions of this process, by the name of the reward."""


class RewardProcesses:
    """Processes that call reward functions. They begin with the first call.

    Args:
        count: number of processes, hence of calls at the same time.
        named: where each function is, ``file.py:function`` or ``module:function``, by the name of the reward.
    """

    def __init__(self, count: int, named: Mapping[str, str]) -> None:
        self._count, self._named = count, dict(named)
        self._pool: ProcessPool | None = None

    def move(self, function: RewardFunction) -> RewardFunction:
        """Return the function as one that runs in these processes; an asynchronous one unchanged."""
        if function.asynchronous or function.name not in self._named:
            return function
        return replace(function, function=_Elsewhere(self, function))

    async def call(self, function: RewardFunction, arguments: dict[str, Any]) -> Any:
        """Call a function and return what it returns. If the caller gives up, its process is ended.

        Raises:
            EnvError: the function raised an error, or its process ended; the text names file and line.
            ServiceFailed: the function raised it.
        """
        try:
            waiting = self._started().schedule(_call, args=(function.name, arguments))
            result, failed, text = await asyncio.wrap_future(waiting)
        except asyncio.CancelledError:
            log.warning("%s: the process that ran it is ended, because it took too long", function.place)
            raise
        except Exception as error:
            # The process has died, or an argument or the result cannot be sent to another process.
            raise EnvError(f"{function.place}: {type(error).__name__}: {error}") from None
        if failed == ServiceFailed.__name__:
            raise ServiceFailed(text)
        if failed:
            raise EnvError(failed) from RemoteTraceback(text)
        return result

    async def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self._pool.join, STOP_S), STOP_S)

    def _started(self) -> "ProcessPool":
        old = self._pool
        # A pool that has lost an idle process takes no further call.
        if old is not None and not old.active:
            self._pool = None
            threading.Thread(target=old.join, name="ends reward processes", daemon=True).start()
        if self._pool is None:
            from pebble import ProcessPool

            # A fork would copy the locks of the actor's threads.
            self._pool = ProcessPool(
                max_workers=self._count,
                initializer=_begin,
                initargs=(self._named,),
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool


class RemoteTraceback(Exception):
    """The traceback of an error in a reward process, as text."""


class _Elsewhere:
    """Stands for a function that runs in another process."""

    def __init__(self, processes: RewardProcesses, function: RewardFunction) -> None:
        self._processes, self._function = processes, function

    async def __call__(self, **arguments: Any) -> Any:
        return await self._processes.call(self._function, arguments)


def _begin(named: Mapping[str, str]) -> None:
    """Load the functions in a new process."""
    die_with_parent()
    loaded: dict[str, ModuleType] = {}
    for name, text in named.items():
        _FUNCTIONS[name] = load_callable(text, "reward", loaded)


def _call(name: str, arguments: dict[str, Any]) -> tuple[Any, str, str]:
    """Return a function's result, or the error that it raised: in one line, and with its traceback.

    An exception would not survive the way back if its class takes other arguments than a text.
    """
    try:
        return _FUNCTIONS[name](**arguments), "", ""
    except ServiceFailed as error:
        return None, ServiceFailed.__name__, str(error)
    except BaseException as error:
        return None, in_one_line(error), traceback.format_exc()
