"""Our side of `benchmarks.generation`: broker, generator and actor, each in a process of its own.

It stays up for the whole benchmark and idles while the other side is measured.
"""

import contextlib
import cProfile
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from actors.config import ActorConfig, GeneratorConfig
from benchmarks.generation.meter import Meter, Outcome, Work, children
from broker.config import BrokerConfig
from envs.registry import EnvConfig
from launch.processes import free_port
from protocol.codec import decode_delivery
from protocol.messages.episodes import Commit, Deliver, DeliveryCredit, PutTasks, Sampling, Task
from protocol.messages.peers import Hello
from protocol.sockets import ThreadLink

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
