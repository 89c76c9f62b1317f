"""A broker, and actors and generators with keys of their own, each role in its own process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from protocol.codec import decode_delivery
from protocol.messages.episodes import Commit, Deliver, DeliveryCredit, PutTasks
from protocol.messages.peers import Hello
from protocol.security import key_files
from protocol.sockets import ThreadLink
from tests.integration.actors.actor_harness import ENV_FILE, counting_task, model_folder
from tests.integration.protocol.encrypted_harness import Broker, until

ROOT = Path(__file__).parents[3]
PATIENCE_S = 90.0
ACTOR = """
import json, logging, sys
from pathlib import Path
logging.basicConfig(level="INFO")
from actors.actor import run_actor
from actors.config import ActorConfig
from envs.registry import EnvConfig
a = json.loads(sys.argv[1])
run_actor(ActorConfig(**a["config"]), name=a["name"], broker=a["broker"], model=a["model"],
          env=EnvConfig(name=a["env"], params={"turns": a["turns"]}), run="run", keys=Path(a["keys"]))
"""
GENERATOR = """
import contextlib, json, logging, sys
from pathlib import Path
logging.basicConfig(level="INFO")
from actors.config import GeneratorConfig
from actors.generator import generator as process
from tests.integration.hosts.counting_engine import CountingEngine
a = json.loads(sys.argv[1])

@contextlib.asynccontextmanager
async def engine(config, *, model, seed):
    yield CountingEngine(Path(model), a["pause_s"])

process.engine_of = engine
process.serve_generator(GeneratorConfig(), name=a["name"], broker=a["broker"], model=a["model"], run="run",
                        seed=0, keys=Path(a["keys"]), grace_s=a["grace_s"])
"""


def model_of_test(folder: Path) -> Path:
    """Make a model folder with a tokenizer and one tensor, and return it."""
    model, tokenizer = model_folder(folder)
    (model / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size()}))
    save_file({"a": np.zeros(2, "f4")}, model / "model.safetensors")
    return model


class Hosts:
    """A run whose processes have the keys of their bundle and no others, and a learner in the test."""

    def __init__(self, folder: Path, journal: Path | None = None, address: str = "127.0.0.1") -> None:
        self.folder, self.keys = folder, folder / "keys"
        key_files.make(self.keys)
        model = model_of_test(folder / "model")
        (folder / "counting.py").write_text(ENV_FILE)
        self.model, self.env = model, f"{folder / 'counting.py'}:Counting"
        self.broker = Broker(self.keys, folder / "broker.log", folder=journal, address=address)
        self.processes: dict[str, subprocess.Popen] = {}
        self.units: list[list] = []
        hello = Hello(role="learner", peer="learner", incarnation=1, epoch=1, deliver="trajectory")
        self.learner = ThreadLink(self.broker.endpoint, hello, keys=self.keys)
        assert self.learner.inbox.get(timeout=PATIENCE_S) is None, "the learner joins first"

    def bundle(self, name: str) -> Path:
        """Make a key for a host now, and return the folder that its owner carries there."""
        key_files.make(self.keys, [name])
        out = self.folder / f"for-{name}"
        key_files.bundle(self.keys, name, out)
        return out

    def actor(self, name: str, keys: Path, *, turns: int = 2, **config) -> subprocess.Popen:
        arguments = {"env": self.env, "turns": turns, "config": config}
        return self._start(ACTOR, name, keys, arguments)

    def generator(self, name: str, keys: Path, *, pause_s: float = 0.0, grace_s=60.0) -> subprocess.Popen:
        return self._start(GENERATOR, name, keys, {"pause_s": pause_s, "grace_s": grace_s})

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def put(self, *names: str) -> None:
        tasks = [counting_task(name, env=self.env, group_id=name, group_size=1) for name in names]
        self.learner.send(PutTasks(tasks=tasks))
        self.learner.send(DeliveryCredit(units=len(names)))

    def delivered(self, count: int) -> list[list]:
        """Wait for so many more units, and return the segments of each."""
        units: list[list] = []
        until(lambda: self._receive(units) >= count, f"{count} units are delivered", PATIENCE_S)
        return units

    def sampled_by(self, *names: str) -> set[str]:
        """Run these tasks, and return the generators that sampled them."""
        self.put(*names)
        segments = [segment for unit in self.delivered(len(names)) for segment in unit]
        assert {s.status for s in segments} <= {"unfinished", "finished"}
        return {segment.generator for segment in segments if segment.generator}

    def stop(self, name: str) -> int:
        """Send SIGTERM, and return the exit code."""
        self.processes[name].send_signal(signal.SIGTERM)
        return self.processes[name].wait(PATIENCE_S)

    def close(self) -> None:
        self.learner.close()
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(PATIENCE_S)
        self.broker.stop()

    def _receive(self, units: list[list]) -> int:
        while not self.learner.inbox.empty():
            item = self.learner.inbox.get()
            if isinstance(item, Exception):
                raise item
            if item is not None and isinstance(item[0], Deliver):
                units.append([segment for segment, _ in decode_delivery(item[0], item[1])])
                self.learner.send(Commit(epoch=1, step=1, trained=[item[0].unit_id]))
        return len(units)

    def _start(self, program: str, name: str, keys: Path, arguments: dict) -> subprocess.Popen:
        given = {"name": name, "broker": self.broker.endpoint, "model": str(self.model), "keys": str(keys)}
        with open(self.folder / f"{name}.log", "ab") as out:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-c", program, json.dumps(given | arguments)],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stderr=out,
            )
        return self.processes[name]
