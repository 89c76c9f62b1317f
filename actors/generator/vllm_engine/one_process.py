"""vLLM's engine core in the process of its caller, for `offbeat train --in-process`: no child process, no socket.

AsyncLLM always asks for a client that starts a child process. `in_this_process` gives it one that calls the core
directly. Everything above it stays: requests, versions of weights, statistics.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

CALLED = (
    "add_request",
    "abort_requests",
    "collective_rpc",
    "get_supported_tasks",
    "pause_scheduler",
    "reset_mm_cache",
    "reset_prefix_cache",
    "resume_scheduler",
    "set_weight_version",
    "sleep",
    "wake_up",
)
"""Functions of the core that AsyncLLM calls as ``NAME_async``."""


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """Let each AsyncLLM that is made in the context have its engine core in this process."""
    from vllm.v1.engine.core_client import EngineCoreClient

    before = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(_client)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = before


def _client(vllm_config: Any, executor_class: Any, log_stats: bool, **_: Any) -> Any:
    """Return an engine core that makes its steps in the event loop of the caller, one at a time."""
    from vllm.v1.engine.core_client import InprocClient

    class OneProcessClient(InprocClient):  # type: ignore[misc]
        engine_ranks_managed = (0,)
        resources = SimpleNamespace(engine_dead=False)

        async def get_output_async(self) -> Any:
            """Make one step as soon as there is work, and return what comes of it."""
            core = self.engine_core
            while core.is_scheduler_paused() or not core.scheduler.has_requests():
                changed.clear()
                await changed.wait()
            # The other roles have their turn between two steps.
            await asyncio.sleep(0)
            return self.get_output()

    changed = asyncio.Event()
    for name in CALLED:
        setattr(OneProcessClient, f"{name}_async", _awaitable(name, changed))
    return OneProcessClient(vllm_config, executor_class, log_stats)


def _awaitable(name: str, changed: asyncio.Event) -> Any:
    async def call(self: Any, *arguments: Any, **settings: Any) -> Any:
        function = getattr(self, name, None) or getattr(self.engine_core, name)
        try:
            return function(*arguments, **settings)
        finally:
            changed.set()

    return call
