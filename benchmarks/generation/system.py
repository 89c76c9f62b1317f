"""Both sides of `benchmarks.generation`, each in processes of its own, and the meter of what they take.

Ours is a broker, a generator and an actor. The other one is an AsyncLLM with a loop around it. Both stay up for the
whole benchmark, and one idles while the other is measured.
"""

import asyncio
import contextlib
import cProfile
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.config import ActorConfig, GeneratorConfig
from broker.config import BrokerConfig
from envs.registry import EnvConfig
from launch.processes import free_port
from protocol.codec import decode_delivery
from protocol.messages.episodes import Commit, Deliver, DeliveryCredit, PutTasks, Sampling, Task
from protocol.messages.peers import Hello
from protocol.sockets import ThreadLink

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Work:
    """The work of one round.

    ``requests`` prompts of ``prompt`` characters, at most ``concurrent`` at a time, answers of ``answer``
    tokens.
    """

    requests: int
    concurrent: int
    prompt: int
    answer: int


@dataclass(frozen=True)
class Outcome:
    """Result of one round: tokens sampled, seconds, and CPU seconds of each process."""

    tokens: int
    seconds: float
    cpu: dict[str, float]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def children(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    found = [
        int(p) for path in Path(f"/proc/{pid}/task").glob("*/children") for p in path.read_text().split()
    ]
    return found + [deeper for child in found for deeper in children(child)]


class Meter:
    """CPU time of named processes since the meter was created."""

    def __init__(self, processes: dict[str, list[int]]) -> None:
        self._processes = processes
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        return {name: sum(map(cpu_seconds, pids)) for name, pids in self._processes.items()}

    def used(self) -> dict[str, float]:
        return {name: seconds - self._before[name] for name, seconds in self._now().items()}


RUN = "benchmark"
ENV = "benchmarks.envs.random_prompt:PromptSuite"
GROUP = 8
WAIT_S = 180.0

_spawn = multiprocessing.get_context("spawn")


def profiled(profile: Path | None, body: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Run the body of a process. If ``profile`` is a path, write a profile of it there."""
    if profile is None:
        body(*arguments, **named)
        return
    profiler = cProfile.Profile()
    try:
        profiler.runcall(body, *arguments, **named)
    finally:
        profiler.dump_stats(profile)


def run_broker(endpoint: str, folder: Path, keys: Path | None) -> None:
    from broker.service import serve

    config = BrokerConfig(endpoint=endpoint)
    serve(config, run=RUN, max_policy_lag=4, journal=folder / "journal", keys=keys)


def run_generator(profile: Path | None, *arguments: Any, **named: Any) -> None:
    from actors.generator.generator import serve_generator

    profiled(profile, serve_generator, *arguments, **named)


def run_an_actor(profile: Path | None, *arguments: Any, **named: Any) -> None:
    from actors.actor import run_actor

    profiled(profile, run_actor, *arguments, **named)


class System:
    """Broker, generator and actor, each in its own process. This process is the learner and counts tokens.

    Args:
        env: environment of the episodes; None: prompts of ``work`` that are answered once.
        actors: number of actors, which share the episodes.
    """

    def __init__(
        self,
        model: Path,
        generator: GeneratorConfig,
        work: Work,
        folder: Path,
        keys: Path | None,
        profile: Path | None,
        env: EnvConfig | None = None,
        actors: int = 1,
    ) -> None:
        folder.mkdir(parents=True)
        self._work, self._rounds = work, 0
        self._env = env or EnvConfig(name=ENV, params={"length": work.prompt})
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        here = {"broker": endpoint, "model": str(model), "run": RUN, "keys": keys}
        profiles = [profile and profile / f"{role}.profile" for role in ("generator", "actor")]
        self._processes = {
            "broker": _spawn.Process(target=run_broker, args=(endpoint, folder, keys)),
            "generator": _spawn.Process(
                target=run_generator,
                args=(profiles[0], generator),
                kwargs=here | {"name": "generator-0", "seed": 0},
            ),
        }
        self._actors = self._make_actors(actors, profiles[1], here)
        self._processes |= self._actors
        for process in self._processes.values():
            process.start()
        hello = Hello(role="learner", peer="learner", incarnation=1, epoch=1, lineage=1)
        # The link's own thread keeps sending heartbeats while the other side is measured.
        self._link = ThreadLink(endpoint, hello, keys=keys)
        self._until(None)
        self._link.send(DeliveryCredit(units=1_000))

    def _make_actors(self, count: int, profile: Path | None, here: dict[str, Any]) -> dict[str, Any]:
        """Return the processes of the actors. Only the first one writes a profile."""
        config = ActorConfig(count=count, concurrent_episodes=-(-self._work.concurrent // count))
        return {
            "actor" if number == 0 else f"actor-{number}": _spawn.Process(
                target=run_an_actor,
                args=(None if number else profile, config),
                kwargs=here | {"name": f"actor-{number}", "env": self._env},
            )
            for number in range(count)
        }

    def round(self, requests: int | None = None) -> Outcome:
        """Run requests, from putting the tasks until the last segment is delivered.

        Args:
            requests: number of requests; None: all of the work.
        """
        meter, began, tokens = Meter(self._pids()), time.perf_counter(), 0
        groups = (requests or self._work.requests) // GROUP
        self._rounds += 1
        self._link.send(PutTasks(tasks=[self._task(n) for n in range(groups * GROUP)]))
        for _ in range(groups):
            deliver, frames = self._until(Deliver)
            tokens += sum(segment.action_tokens for segment, _ in decode_delivery(deliver, frames))
            self._link.send(DeliveryCredit(units=1))
            self._link.send(Commit(epoch=1, step=self._rounds, trained=[deliver.unit_id]))
        return Outcome(tokens, time.perf_counter() - began, meter.used())

    def close(self) -> None:
        self._link.close("the benchmark is over")
        for name in (*self._actors, "generator", "broker"):
            self._processes[name].terminate()
            self._processes[name].join(30.0)

    def _task(self, number: int) -> Task:
        group = f"{self._rounds}g{number // GROUP}"
        return Task(
            task_id=f"{group}.{number % GROUP}", env=self._env.name, data={"index": number, "split": "train"},
            group_id=group, group_size=GROUP, member=number % GROUP,
            sampling=Sampling(max_turn_tokens=self._work.answer, max_trajectory_tokens=1_000),
        )  # fmt: skip

    def _pids(self) -> dict[str, list[int]]:
        pids = {name: [process.pid or 0] for name, process in self._processes.items()}
        beside = {
            name: children(pids[role][0]) for role, name in (("generator", "engine"), ("actor", "agents"))
        }
        return pids | {name: found for name, found in beside.items() if found} | {"learner": [os.getpid()]}

    def _until(self, kind: type[Any] | None) -> tuple[Any, Sequence[Any]]:
        """Return the next message of a kind. With None, wait until we have joined the broker.

        Raises:
            RuntimeError: no such message came within `WAIT_S`, or a process has ended.
        """
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and all(p.is_alive() for p in self._processes.values()):
            with contextlib.suppress(queue.Empty):
                item = self._link.inbox.get(timeout=0.5)
                if isinstance(item, Exception):
                    raise item
                if item is None and kind is None:
                    return None, []
                if item is not None and kind is not None and isinstance(item[0], kind):
                    return item
        raise RuntimeError(f"no {kind and kind.__name__} within {WAIT_S:g} s, or a process has ended")


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
