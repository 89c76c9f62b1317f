"""The other side of `benchmarks.generation`: an AsyncLLM with a loop around it, in a process of its own.

It stays up for the whole benchmark and idles while our side is measured.
"""

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from actors.config import GeneratorConfig
from benchmarks.generation.meter import Meter, Outcome, Work, children
from benchmarks.generation.system import WAIT_S

_spawn = multiprocessing.get_context("spawn")


class Bare:
    """An AsyncLLM in its own process, with the engine settings of our generator.

    Mode "log-probs" uses the sampling parameters of our generator. Mode "plain" leaves out the
    log-probabilities. Mode "final" leaves them out too, and returns only the final output of each request.
    """

    def __init__(self, model: Path, generator: GeneratorConfig, work: Work) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=run_bare, args=(model, generator, work, theirs))
        self._process.start()

    def round(self, mode: str, requests: int | None = None) -> Outcome:
        """Run one round.

        Args:
            requests: number of requests, all of the work at most; None: all of them.
        """
        pid = self._process.pid or 0
        meter = Meter({"frontend": [pid], "engine": children(pid)})
        self._pipe.send((mode, requests))
        if not self._pipe.poll(WAIT_S):
            raise RuntimeError(f"the bare engine has not answered for {WAIT_S:g} s")
        tokens, seconds = self._pipe.recv()
        return Outcome(tokens, seconds, meter.used())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(("", None))
        self._process.join(30.0)
        self._process.terminate()


def run_bare(model: Path, config: GeneratorConfig, work: Work, pipe: Any) -> None:
    asyncio.run(bare(model, config, work, pipe))


async def bare(model: Path, config: GeneratorConfig, work: Work, pipe: Any) -> None:
    """Run one round for each mode and number of requests that come over the pipe, until the mode is empty."""
    from actors.generator.vllm_engine.engine import VllmEngine
    from actors.render import Renderer
    from benchmarks.envs.random_prompt import PromptSuite

    engine = await VllmEngine.start(config, model=str(model), seed=0)
    renderer, suite = Renderer(model), PromptSuite(work.prompt)
    prompts = [renderer.prompt([suite.question(n)]) for n in range(work.requests)]
    rounds = 0
    while (asked := await asyncio.to_thread(pipe.recv))[0]:
        mode, requests = asked
        sampling = parameters(engine, mode, work, renderer.eos_ids)
        counts: list[int] = []
        began = time.perf_counter()
        todo = iter(enumerate(prompts[:requests]))
        loops = (ask(engine._llm, todo, sampling, f"{rounds}-", counts) for _ in range(work.concurrent))
        await asyncio.gather(*loops)
        pipe.send((sum(counts), time.perf_counter() - began))
        rounds += 1
    await engine.close()


def parameters(engine: Any, mode: str, work: Work, stop: Sequence[int]) -> Any:
    from vllm.sampling_params import RequestOutputKind

    from actors.generator.engine import Request

    sampling = engine._sampling(Request("", [0], work.answer, 1.0, 1.0, 0, None, list(stop)))
    if mode != "log-probs":
        sampling.logprobs = None
    if mode == "final":
        sampling.output_kind = RequestOutputKind.FINAL_ONLY
    return sampling


async def ask(
    llm: Any, todo: Iterator[tuple[int, list[int]]], sampling: Any, prefix: str, counts: list[int]
) -> None:
    """Run one request after the other until none is left. Append the tokens of each answer to ``counts``."""
    for number, prompt in todo:
        count = 0
        async for output in llm.generate(
            {"type": "token", "prompt_token_ids": prompt}, sampling, f"{prefix}{number}"
        ):
            count += len(output.outputs[0].token_ids)
        counts.append(count)
