"""Lets the workers of an engine map a version's file before they have to load it."""

import asyncio
from pathlib import Path
from typing import Any

POLL_S = 0.02
"""Time between two questions to the workers."""


async def map_ahead(llm: Any, data: Path) -> None:
    """Let all workers map a file, and wait until they have, while the engine goes on. Without a GPU do nothing.

    On a CPU a call of the workers would wait for the step that runs, which may take seconds.

    Args:
        llm: vLLM's AsyncLLM, whose workers are of `actors.generator.vllm_engine.worker.WeightWorker`.
    """
    if llm.vllm_config.device_config.device_type != "cuda":
        return
    await llm.collective_rpc("map_ahead", args=(str(data),))
    while not all(await llm.collective_rpc("is_mapped")):  # noqa: ASYNC110  # the workers are other processes
        await asyncio.sleep(POLL_S)
