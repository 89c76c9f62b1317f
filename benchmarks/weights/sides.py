"""Processes of `benchmarks.weights`: a generator that loads announced versions, and a server of weights."""

import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors.config import GeneratorConfig
from actors.generator.generator import SWITCH_S
from actors.sampled import Sampled
from protocol.security.http import access
from protocol.weights.format import version_folder

RUN = "benchmark"
WAIT_S = 180.0
PROMPT, ANSWER = 32, 400
WINDOW_S = 1.0
AFTER_S = 3.0

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Told:
    """Announcement of a version that the generator has to load."""

    version: int
    manifest: str
    sources: tuple[str, ...]
    root: str


@dataclass
class Taken:
    """Times of one update: moments on the machine's monotonic clock in seconds, and durations in seconds."""

    staged: float = 0.0
    serving: float = 0.0
    paused_s: float = 0.0
    load_s: float = 0.0
    step_s: float = 0.0
    """Seconds from the request for the pause until the running step has ended."""
    lost_s: float = 0.0
    """Seconds of generation lost to the update, for the pause and for everything computed again."""
    failure: str = ""


class Side:
    """A process of the benchmark, with a pipe to it."""

    def __init__(self, body: Any, *arguments: Any) -> None:
        self.pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=body, args=(*arguments, theirs))
        self.process.start()

    def receive(self) -> Any:
        if not self.pipe.poll(WAIT_S):
            raise RuntimeError(f"a process of the benchmark has said nothing for {WAIT_S:g} s")
        return self.pipe.recv()

    def ask(self, command: Any) -> Any:
        self.pipe.send(command)
        return self.receive()

    def close(self) -> None:
        self.process.terminate()
        self.process.join(30.0)


def run_server(folder: Path, keys: Path | None, pipe: Any) -> None:
    """Run the process that serves the learner's folder."""
    from protocol.security.http import scheme
    from protocol.weights.server import WeightsServer, serving

    async def serve() -> None:
        server = WeightsServer(RUN, lambda _, version: version_folder(folder, version), folder.parent, keys)
        async with serving(server, "127.0.0.1", 0) as port:
            pipe.send(f"{scheme(keys)}://127.0.0.1:{port}")
            await asyncio.Event().wait()

    asyncio.run(serve())


def run_generator(model: Path, config: GeneratorConfig, shared: Path, keys: Path | None, pipe: Any) -> None:
    """Run the generator's process."""
    # A real generator sets this too.
    sys.setswitchinterval(SWITCH_S)
    asyncio.run(_generate(model, config, shared, keys, pipe))


async def _generate(model: Path, config: GeneratorConfig, shared: Path, keys: Path | None, pipe: Any) -> None:
    from actors.generator.engine import read_model_facts
    from actors.generator.vllm_engine.engine import VllmEngine
    from actors.generator.weights.cache import Cache
    from actors.generator.weights.staging import Stage

    engine = await VllmEngine.start(config, model=str(model), seed=0)
    cache = Cache(shared / "cache", RUN, partial(access, keys))
    stage = Stage("benchmark", read_model_facts(model).shapes, root=shared, cache=cache)
    pipe.send("ready")
    taking = _Taking(engine, stage)
    while True:
        command = await asyncio.to_thread(pipe.recv)
        pipe.send(await (taking.take(command) if isinstance(command, Told) else taking.sample(command)))


class _Taking:
    """A sampler that loads versions as a generator does, and measures the time."""

    def __init__(self, engine: Any, stage: Any) -> None:
        self._engine, self._stage = engine, stage
        self._loops: list[asyncio.Task[None]] = []
        self._tokens, self._started = 0, 0
        self._rate = self._load_s = self._step_s = 0.0
        self._failure = ""
        for name in ("collective_rpc", "update_weight_version"):
            setattr(engine._llm, name, self._timed(getattr(engine._llm, name), "_load_s"))
        core = engine._llm.engine_core
        core.pause_scheduler_async = self._timed(core.pause_scheduler_async, "_step_s")

    async def sample(self, requests: int) -> float:
        """Keep ``requests`` requests running from now on. Return the tokens per second.

        Without requests, return the rate that was measured last.
        """
        for loop in self._loops:
            loop.cancel()
        if self._loops:
            await asyncio.wait(self._loops)
        self._loops = [asyncio.create_task(self._ask(n)) for n in range(requests)]
        if requests:
            self._rate = statistics.median([await self._measure() for _ in range(4)])
        else:
            # After one more request, the step that the cancelled requests left behind has ended.
            await self._one(1)
        return self._rate

    async def take(self, told: Told) -> Taken:
        from actors.generator.weights.staging import Announced, WeightUpdater

        taken, self._load_s, self._step_s = Taken(), 0.0, 0.0
        watched = _Watched(self._stage, taken)
        updater = WeightUpdater(self._engine, _NoQueue(), watched, RUN, on_failure=self._failed)  # type: ignore[arg-type]
        if not await updater.update(Announced(1, told.version, told.manifest, told.sources, told.root)):
            taken.failure = self._failure or "the version was refused; see the log"
            return taken
        taken.serving = time.perf_counter()
        taken.paused_s = updater.gauges()["update_pause_seconds"]
        taken.load_s, taken.step_s = self._load_s, self._step_s
        if self._loops:
            taken.lost_s = await self._lost(taken)
        return taken

    async def _measure(self) -> float:
        before, began = self._tokens, time.perf_counter()
        await asyncio.sleep(WINDOW_S)
        return (self._tokens - before) / (time.perf_counter() - began)

    async def _lost(self, taken: Taken) -> float:
        """Return the seconds of generation lost to an update.

        `AFTER_S` after the update, this is the time since the pause began, minus the time that the sampled
        tokens would take without an update.
        """
        before = self._tokens
        await asyncio.sleep(AFTER_S)
        sampling_s = (self._tokens - before) / self._rate
        return taken.paused_s + (time.perf_counter() - taken.serving) - sampling_s

    async def _ask(self, number: int) -> None:
        while True:
            await self._one(ANSWER, number)

    async def _one(self, max_tokens: int, number: int = 0) -> None:
        from actors.generator.engine import Request

        self._started += 1
        prompt = [number % 40 + 7] * PROMPT
        request = Request(str(self._started), prompt, max_tokens, 1.0, 1.0, 0, None, [])
        answer: AsyncIterator[Sampled] = self._engine.generate(request)
        async for sampled in answer:
            self._tokens += len(sampled)

    def _timed(self, call: Any, total: str) -> Any:
        async def timed(*arguments: Any, **named: Any) -> None:
            began = time.perf_counter()
            await call(*arguments, **named)
            setattr(self, total, getattr(self, total) + time.perf_counter() - began)

        return timed

    def _failed(self, why: str) -> None:
        self._failure = why


class _Watched:
    """A stage that notes when a version is ready to load."""

    def __init__(self, stage: Any, taken: Taken) -> None:
        self._stage, self._taken = stage, taken
        self.discard, self.accepted = stage.discard, stage.accepted

    def stage(self, *arguments: Any) -> Any:
        staged = self._stage.stage(*arguments)
        self._taken.staged = time.perf_counter()
        return staged


class _NoQueue:
    """A queue that skips nothing, because the benchmark announces one version at a time."""

    skipped = 0

    def never(self, announced: Any) -> None:
        """Do nothing, because no version is announced twice."""
