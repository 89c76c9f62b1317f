"""Measure what a new version costs generation: the pause for its load, and the time to recompute running requests.

Many long requests run. The time for a number of further tokens is taken without an update, and with one at its
beginning; the difference is the update's cost. "kept" leaves the requests their keys and values, "recomputed" does
not.
"""

import asyncio
from typing import Literal

from actors.config import GeneratorConfig
from actors.generator.engine import Request
from actors.generator.vllm_engine.engine import VllmEngine
from benchmarks.gpu.generation import published, requests_of
from benchmarks.gpu.setting import GpuSetting, make_model
from benchmarks.report import Figure

KINDS: tuple[Literal["kept", "recomputed"], ...] = ("kept", "recomputed")
TOKENS_OF_EACH = 32
"""Tokens of a request, on average, in one timed part."""


class Crowd:
    """Requests that run at the same time, and the tokens that they have got.

    Args:
        count: number of requests.
        prompt: tokens of each prompt.
        longest: most tokens of an answer; it has to be enough for all timed parts.
    """

    def __init__(self, engine: VllmEngine, name: str, *, count: int, prompt: int, longest: int) -> None:
        self.count, self.tokens = count, 0
        self._engine, self._grown = engine, asyncio.Condition()
        self._requests = requests_of(name, count, longest, tag="crowd", length=prompt)
        self._tasks = [asyncio.create_task(self._run(request)) for request in self._requests]

    async def _run(self, request: Request) -> None:
        async for sampled in self._engine.generate(request):
            async with self._grown:
                self.tokens += len(sampled)
                self._grown.notify_all()

    async def until(self, tokens: int) -> None:
        """Wait until the requests have this number of tokens.

        Raises:
            RuntimeError: a request has ended before.
        """
        async with self._grown:
            while self.tokens < tokens:
                if any(task.done() for task in self._tasks):
                    raise RuntimeError("a request has ended while it was measured; give answers more room")
                await self._grown.wait()

    async def more(self) -> float:
        """Return the seconds until all requests together have got further tokens."""
        clock = asyncio.get_running_loop().time
        began = clock()
        await self.until(self.tokens + self.count * TOKENS_OF_EACH)
        return clock() - began

    async def close(self) -> None:
        """End all requests."""
        for request in self._requests:
            await self._engine.abort(request.id)
        await asyncio.gather(*self._tasks)


def measure(setting: GpuSetting) -> list[Figure]:
    """Measure each model with both kinds of updates."""
    return [
        figure
        for name in setting.models
        for kind in KINDS
        for figure in asyncio.run(costs(setting, name, kind))
    ]


async def costs(setting: GpuSetting, name: str, kind: Literal["kept", "recomputed"]) -> list[Figure]:
    """Start an engine with running requests, and update it in their middle."""
    folder = make_model(name, setting.shelf, setting.dtype, setting.device)
    count, prompt = (4, 48) if setting.tiny else (256, 1024)
    # Each repetition has two timed parts. The first tokens and a warm-up come before.
    longest = TOKENS_OF_EACH * (2 * setting.repetitions + 6)
    config = GeneratorConfig(
        dtype=setting.dtype_name,  # type: ignore[arg-type]
        max_model_len=prompt + longest,
        max_num_seqs=count,
        gpu_memory_utilization=0.85,
        enforce_eager=setting.tiny or not setting.cuda,
        kv_on_update=kind,
        stream_interval=4,
    )
    engine = await VllmEngine.start(config, model=str(folder), seed=0)
    manifest, file = published(folder, setting.folder / f"update-{kind}")
    plain, updated, pauses = list[float](), list[float](), list[float]()
    try:
        crowd = Crowd(engine, name, count=count, prompt=prompt, longest=longest)
        await crowd.until(count * TOKENS_OF_EACH // 4)
        # The first load allocates.
        await engine.apply_weights(manifest, file)
        await crowd.more()
        for _ in range(setting.repetitions):
            plain.append(await crowd.more())
            load = asyncio.create_task(engine.apply_weights(manifest, file))
            updated.append(await crowd.more())
            pauses.append(await load)
        await crowd.close()
    finally:
        await engine.close()
    where = f"{name}, {count} running requests of {prompt} tokens and more, cache {kind}"
    cost = [after - before for after, before in zip(updated, plain, strict=True)]
    rate = [count * TOKENS_OF_EACH / before for before in plain]
    lost = [seconds * each for seconds, each in zip(cost, rate, strict=True)]
    return [
        Figure(f"{where}: cost of an update", "s", cost, "pause for the load", pauses),
        Figure(f"{where}: tokens lost to an update", "tokens", lost),
    ]
