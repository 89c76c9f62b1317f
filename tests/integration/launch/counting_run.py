"""`launch.role` for a run without a model: generators with few places, and a learner that takes time for each token.

`COUNTING_PAUSE_S` is the time between two tokens of an answer, `COUNTING_PLACES` the answers that a generator gives at
a time. `COUNTING_BATCH` episodes make a step of the learner, which trains `COUNTING_PACE` tokens in a second. With
`COUNTING_PUBLISHES`, each step publishes a version, and `lags.json` has the tokens trained so far by their lag.
"""

import asyncio
import contextlib
import itertools
import json
import os
import queue
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from actors.generator import generator as process
from launch.role import main
from launch.run_folder import load_config, prepare_keys
from learner.run_files import RESULT, weights_folder
from protocol.codec import decode_delivery
from protocol.files import write_whole
from protocol.messages.episodes import Commit, Deliver, DeliveryCredit, PutTasks
from protocol.messages.peers import Hello, PublishWeights
from protocol.session import Progress
from protocol.sockets import ThreadLink
from protocol.weights.files import write_version
from protocol.weights.format import version_folder
from tests.integration.actors.actor_harness import counting_task
from tests.integration.hosts.counting_engine import CountingEngine

AHEAD = 3
"""Batches of episodes that are under way."""
LOOK_S = 0.2
LAGS = "lags.json"
KEPT = 8
"""Versions on the disk."""


class FewPlaces(CountingEngine):
    """An engine whose rate does not grow with its requests beyond its places."""

    def __init__(self, model, pause_s, places):
        super().__init__(model, pause_s)
        self._places = asyncio.Semaphore(places)

    async def generate(self, request):
        async with self._places:
            async for sampled in super().generate(request):
                yield sampled


@contextlib.asynccontextmanager
async def engine(config, *, model, seed):
    given = os.environ
    yield FewPlaces(Path(model), float(given["COUNTING_PAUSE_S"]), int(given["COUNTING_PLACES"]))


class Learner:
    """Keeps tasks under way, takes batches, and says what a real learner says of its steps."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._config = folder, load_config(folder / "config.json")
        self._batch, self._pace = int(os.environ["COUNTING_BATCH"]), float(os.environ["COUNTING_PACE"])
        self._tokens = self._busy_s = self._idle_s = 0.0
        self._steps, self._names, self._units = 0, itertools.count(), []
        self._trained, self._twice = set(), 0
        self._publishes, self._lags = bool(os.environ.get("COUNTING_PUBLISHES")), Counter()
        hello = Hello(role="learner", peer="learner", incarnation=1, epoch=1, deliver="trajectory")
        keys = prepare_keys(self._config, folder, "learner")
        self._link = ThreadLink(self._config.broker.endpoint, hello, progress=self._progress, keys=keys)

    def _progress(self) -> Progress:
        sums = {
            "trained_tokens_total": self._tokens,
            "busy_seconds_total": self._busy_s,
            "idle_seconds_total": self._idle_s,
        }
        return Progress(progress=self._steps, busy=False, gauges=tuple(sums.items()) if self._steps else ())

    def _put(self, count: int) -> None:
        names = [f"t{next(self._names)}" for _ in range(count)]
        env = self._config.env.name
        tasks = [counting_task(name, env=env, group_id=name, group_size=1) for name in names]
        self._link.send(PutTasks(tasks=tasks))
        self._link.send(DeliveryCredit(units=count))

    def run(self) -> None:
        assert self._link.inbox.get(timeout=60.0) is None
        self._put(AHEAD * self._batch)
        while not (self._folder / "enough").exists():
            began = time.monotonic()
            if not self._take(began):
                continue
            units, self._units = self._units[: self._batch], self._units[self._batch :]
            waited_s = time.monotonic() - began
            tokens = sum(len(versions) for _, versions in units)
            for _, versions in units:
                self._lags.update((self._steps - versions).tolist())
            self._steps += 1
            self._twice += sum(name in self._trained for name, _ in units)
            self._trained |= {name for name, _ in units}
            # This is the work of a step, and no wait for somebody.
            time.sleep(tokens / self._pace)
            self._link.send(Commit(epoch=1, step=self._steps, trained=[name for name, _ in units]))
            if self._publishes:
                self._publish()
            self._put(len(units))
            spent_s = time.monotonic() - began
            self._tokens, self._busy_s, self._idle_s = (
                self._tokens + tokens,
                self._busy_s + spent_s - waited_s,
                self._idle_s + waited_s,
            )
        (self._folder / RESULT).write_text(json.dumps({"twice": self._twice}))
        self._link.close("the run is over", "over")

    def _publish(self) -> None:
        write_whole(self._folder / LAGS, json.dumps(self._lags), durable=False)
        folder, version = weights_folder(self._folder), self._steps
        folder.mkdir(exist_ok=True)
        tensors = [("a", memoryview(np.full(2, version, "<f4")).cast("B"))]
        manifest = write_version(
            folder, run="run", epoch=1, version=version, shapes={"a": ("F32", (2,))}, tensors=tensors
        )
        self._link.send(PublishWeights(epoch=1, version=version, manifest=str(manifest)))
        shutil.rmtree(version_folder(folder, version - KEPT), ignore_errors=True)

    def _take(self, began: float) -> bool:
        """Wait for a batch. Return whether it is there before the run is to end."""
        while len(self._units) < self._batch:
            try:
                item = self._link.inbox.get(timeout=LOOK_S)
            except queue.Empty:
                if (self._folder / "enough").exists():
                    return False
                continue
            if isinstance(item, Exception):
                raise item
            if item is not None and isinstance(item[0], Deliver):
                versions = [arrays["policy_version"] for _, arrays in decode_delivery(item[0], item[1])]
                sampled = np.concatenate(versions)
                self._units.append((item[0].unit_id, sampled[sampled >= 0]))
        return True


if __name__ == "__main__":
    if sys.argv[1] == "learner":
        Learner(Path(sys.argv[2])).run()
    else:
        process.engine_of = engine
        main()
