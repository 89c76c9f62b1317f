"""A head without a model: the real supervisor and broker, and a learner with checkpoints that counts."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from launch import cli
from launch.errors import NoAnswer
from launch.preflight.examine import Examined
from launch.processes import free_ports
from launch.run_file.load import load
from launch.run_file.sections import RunConfig
from launch.run_folder import CONFIG, load_config, prepare_keys
from launch.supervise import crew, supervisor
from launch.supervise.broker_status import fetch
from launch.supervise.panel import Panel
from launch.supervise.summary import Course
from learner.process import SIGNALLED, end_of_run
from learner.run_files import RESULT
from protocol.codec import decode_delivery
from protocol.errors import KeysUnusable
from protocol.files import write_whole
from protocol.messages.episodes import Checkpointed, Commit, Deliver, DeliveryCredit, Held, PutTasks
from protocol.messages.peers import Hello
from protocol.sockets import ThreadLink
from tests.campaigns.faults.proof import MUST_BE_EMPTY, Proof, prove
from tests.integration.actors.actor_harness import ENV_FILE, counting_task
from tests.integration.hosts.fleet_harness import OFFBEAT
from tests.integration.hosts.hosts_harness import ROOT, model_of_test
from tests.integration.protocol.encrypted_harness import until

PROGRAM = "tests.integration.hosts.counted_head"
COUNTED = f"""
import sys
if sys.argv[1] == "train":
    from {PROGRAM} import train
    sys.exit(train(sys.argv[1:]))
"""
BATCH, AHEAD, LOOK_S = 4, 12, 0.2
STATE, STARTS, ENOUGH = "counted.json", "starts", "enough"
FOLDER, NOT_YET = "runs/run", "not-yet"
"""Run folder, as the head's command names it; and a file beside it that keeps the learner from its beginning."""


class Learner:
    """Trains units in batches. Its checkpoint, of every step, is the list of what it has trained."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._folder, self._env = folder, config.env.name
        self._state: dict[str, Any] = {"epoch": 0, "step": 0, "put": 0, "trained": [], "again": 0}
        if (folder / STATE).exists():
            self._state |= json.loads((folder / STATE).read_text())
        self._state["epoch"] += 1
        self._save()
        (folder / "epoch").write_text(str(self._epoch))
        hello = Hello(
            role="learner", peer="learner", incarnation=self._epoch, epoch=self._epoch, lineage=1,
            step=self._state["step"], deliver="trajectory",
        )  # fmt: skip
        self._link = ThreadLink(config.broker.endpoint, hello, keys=prepare_keys(config, folder, "learner"))

    @property
    def _epoch(self) -> int:
        return int(self._state["epoch"])

    def _save(self) -> None:
        write_whole(self._folder / STATE, json.dumps(self._state))

    def _put(self, count: int) -> None:
        first = self._state["put"]
        self._state["put"] += count
        self._save()
        names = [f"t{number}" for number in range(first, first + count)]
        tasks = [counting_task(name, env=self._env, group_id=name, group_size=1) for name in names]
        self._link.send(PutTasks(tasks=tasks))

    def _commit(self, units: list[str]) -> None:
        self._link.send(Commit(epoch=self._epoch, step=self._state["step"], trained=units))

    def run(self) -> None:
        under_way, units = 0, []
        asked = list[int]()
        signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
        while not asked and not (self._folder / ENOUGH).exists():
            if self._link.inbox.empty():
                time.sleep(LOOK_S)
                continue
            item = self._link.inbox.get()
            if isinstance(item, Exception):
                raise item
            match item and item[0]:
                case Held(task_ids=tasks, unit_ids=held, more=more):
                    under_way += len(tasks)
                    # Their commit was lost with the head.
                    if known := [unit for unit in held if unit in self._state["trained"]]:
                        self._commit(known)
                    if not more:
                        self._link.send(DeliveryCredit(units=AHEAD))
                        self._put(max(0, AHEAD - under_way))
                case Deliver(unit_id=unit):
                    decode_delivery(*item)
                    self._link.send(DeliveryCredit(units=1))
                    if unit in self._state["trained"]:
                        self._state["again"] += 1
                        self._commit([unit])
                    else:
                        units.append(unit)
            if len(units) >= BATCH:
                self._state["step"] += 1
                self._state["trained"] += units
                self._save()
                self._commit(units)
                self._link.send(Checkpointed(epoch=self._epoch, step=self._state["step"]))
                units = []
                self._put(BATCH)
        ended_by = SIGNALLED if asked else "all steps done"
        then = end_of_run(ended_by, "")
        result = {"ended_by": ended_by, "run": then, "steps": self._state["step"]}
        write_whole(self._folder / RESULT, json.dumps(result))
        self._link.close(ended_by, then)


def train(words: list[str]) -> int:
    """Run `offbeat train`, the real one but for the model, the examination, the roles and the summary."""
    # The head's addresses stay on loopback, where all nodes of a test are.
    words = [word for word in words if not word.startswith(("broker.", "weights."))]
    crew.command_of_role = lambda role, *rest, ranks=None: [
        sys.executable,
        "-m",
        PROGRAM,
        role,
        *map(str, rest),
    ]
    cli.examined = lambda config: Examined(config, [])
    supervisor.write_summary = summary
    Panel.show = lambda *_: None
    with open(STARTS, "a") as starts:
        starts.write(f"{'--again' in words and (Path(FOLDER) / 'epoch').exists()}\n")
    return cli.main(words)


def summary(config: RunConfig, folder: Path, course: Course, note: Any) -> dict[str, Any]:
    """Return the part of a summary that the exit code follows from."""
    return {"ended_by": course.ended_by, "then": json.loads((folder / RESULT).read_text())["run"]}


class CountedRun:
    """A run file whose `offbeat train` counts, and whose hosts join it. Everything is in one folder.

    Args:
        program: the file that becomes the command `offbeat`.
        before: lines of shell that this command runs first.
    """

    def __init__(self, home: Path, program: Path, before: str = "") -> None:
        self.home, self.folder, self.file = home, home / FOLDER, home / "run.toml"
        (home / "counting.py").write_text(ENV_FILE)
        model = model_of_test(home / "model")
        broker, http, weights = free_ports(3)
        self.file.write_text(
            f'''[run]
name = "run"
[model]
path = "{model}"
[env]
name = "{home / "counting.py"}:Counting"
params = {{turns = 2}}
[broker]
endpoint = "tcp://127.0.0.1:{broker}"
http = "127.0.0.1:{http}"
heartbeat_s = 1.0
[weights]
http = "127.0.0.1:{weights}"
[generator]
max_model_len = 256
[actor]
concurrent_episodes = 4
max_turns = 8
'''
        )
        self.config = load(self.file, [])
        program.parent.mkdir(exist_ok=True)
        script = program.with_suffix(".py")
        script.write_text(COUNTED + OFFBEAT)
        variables = {
            "PYTHONPATH": ROOT, "XDG_CACHE_HOME": home / "cache", "OMP_NUM_THREADS": 1, "HOME": home,
            "COUNTING_PAUSE_S": 0.05, "OFFBEAT_LOG_LEVEL": "debug",
        }  # fmt: skip
        exports = " ".join(f"{name}={value}" for name, value in variables.items())
        program.write_text(f'#!/bin/sh\nexport {exports}\n{before}\nexec {sys.executable} {script} "$@"\n')
        program.chmod(0o755)

    def status(self) -> dict[str, Any] | None:
        """Return the broker's status; None while it does not answer."""
        try:
            return fetch(self.config.broker.http, 5.0, keys=self.folder / "keys")
        except (NoAnswer, KeysUnusable):
            return None

    def hosts(self) -> set[str]:
        """Return the names of the hosts that have processes."""
        hosts = (self.status() or {"hosts": ()})["hosts"]
        return {one["name"] for one in hosts if one["generators"] or one["actors"]}

    def counted(self) -> dict[str, Any]:
        """Return the learner's checkpoint."""
        path = self.folder / STATE
        return json.loads(path.read_text()) if path.exists() else {"step": 0, "epoch": 0, "trained": []}

    def starts(self) -> list[str]:
        """Return whether each start of the head had a learner of this run to go on from."""
        return (self.home / STARTS).read_text().split()

    def go_on(self, steps: int, patience_s: float) -> None:
        """Wait until the learner has done so many more steps."""
        goal = self.counted()["step"] + steps
        until(lambda: self.counted()["step"] >= goal, f"{steps} further steps", patience_s)

    def prove(self, steps: int) -> Proof:
        """Prove from the journal and the actors' logs that nothing was lost, and nothing was trained twice."""
        for path in self.folder.glob("hosts/*/logs/actor*.log"):
            (self.folder / "logs" / path.name).symlink_to(path)
        proof = prove(self.folder)
        assert not any(getattr(proof, what) for what in MUST_BE_EMPTY), proof
        trained = self.counted()["trained"]
        assert proof.units_trained == len(trained) == len(set(trained)) >= steps * BATCH
        return proof


if __name__ == "__main__":
    if sys.argv[1] == "learner":
        run_folder = Path(sys.argv[2])
        while run_folder.with_name(NOT_YET).exists():
            time.sleep(LOOK_S)
        Learner(run_folder, load_config(run_folder / CONFIG)).run()
    else:
        from tests.integration.hosts.counting_role import engine, main, process

        process.engine_of = engine
        main()
