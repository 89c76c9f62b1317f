"""Hosts that come and go, beside a static fleet, and beside a run that is started again at each change.

Broker, actors and generators are the real processes, each host a generator and an actor. The engine has no model and
gives so many answers at a time at a fixed rate, and the learner is never the limit, so that the fleet is measured and
not a model (`tests/integration/launch/counting_run.py`). Half of the hosts leave by SIGTERM, half by SIGKILL.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, save_results, spread
from launch import run_folder
from launch.errors import NoAnswer
from launch.run_file.load import check
from launch.supervise.broker_status import fetch

ROLE = "tests.integration.launch.counting_run"
MAKE = """
import sys
from pathlib import Path
from tests.integration.actors.actor_harness import ENV_FILE
from tests.integration.hosts.hosts_harness import model_of_test
folder = Path(sys.argv[1])
model_of_test(folder / "model")
(folder / "counting.py").write_text(ENV_FILE)
"""
ENGINE = {
    "COUNTING_PAUSE_S": "0.1",
    "COUNTING_PLACES": "4",
    "COUNTING_BATCH": "8",
    "COUNTING_PACE": "4000",
    "COUNTING_PUBLISHES": "1",
}
"""A host samples 40 tokens per second, and the learner trains 4,000 and publishes a version after each step."""
JOIN_S = 180.0
"""Longest wait until all processes of a fleet have joined."""
POLL_S = 0.25
ARMS = ("static", "elastic", "restart")


@dataclass(frozen=True)
class Change:
    """One host that comes or goes."""

    at: float
    comes: bool
    killed: bool = False
    """Whether a host that goes is killed at once, and not asked to leave."""


def trace(seed: int, seconds: float, mean: int, every_s: float) -> list[Change]:
    """Return when hosts come and go: a Poisson process, with at least one host and fewer than twice the mean.

    Example:
        >>> [(round(one.at), one.comes) for one in trace(0, 120.0, 3, 30.0)]
        [(56, False), (65, False), (111, True)]
    """
    rng, at, hosts, found = random.Random(seed), 0.0, mean, list[Change]()
    while (at := at + rng.expovariate(1 / every_s)) < seconds:
        comes = hosts == 1 or (hosts < 2 * mean - 1 and rng.random() < 0.5)
        hosts += 1 if comes else -1
        found.append(Change(at, comes, killed=not comes and rng.random() < 0.5))
    return found


def host_seconds(changes: Sequence[Change], hosts: int, seconds: float) -> float:
    """Return the sum of the times that all hosts are there.

    Example:
        >>> host_seconds([Change(10.0, comes=True), Change(30.0, comes=False)], 2, 60.0)
        140.0
    """
    total, sizes, times = 0.0, [hosts], [0.0, *(one.at for one in changes), seconds]
    for one in changes:
        sizes.append(sizes[-1] + (1 if one.comes else -1))
    for size, (begin, end) in zip(sizes, pairwise(times), strict=True):
        total += size * (end - begin)
    return total


@dataclass
class Outcome:
    """What one arm did."""

    arm: str
    seed: int
    seconds: float
    changes: int
    host_seconds: float
    trained: int = 0
    """Action tokens."""
    lags: dict[int, int] = field(default_factory=dict)
    """Trained action tokens by their lag: how many versions the learner had published since they were sampled."""
    stale: int = 0
    lost: int = 0
    """Tokens whose outcome is `lost`."""
    twice: int = 0
    """Units that were trained twice."""
    dealt_again: int = 0
    """Tasks that were dealt again because their host had gone."""
    violations: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Trained tokens per second and host."""
        return self.trained / self.host_seconds

    @property
    def lag(self) -> float:
        """Mean lag of a trained token, in versions; NaN if none was trained."""
        tokens = sum(self.lags.values())
        return sum(lag * count for lag, count in self.lags.items()) / tokens if tokens else math.nan


class Fleet:
    """Broker, learner and hosts of one run, without a supervisor."""

    def __init__(self, folder: Path) -> None:
        settings = {
            "run": {"name": "run", "dir": str(folder)},
            "model": {"path": str(folder / "model")},
            "env": {"name": f"{folder / 'counting.py'}:Counting", "params": {"turns": 2}},
            "generator": {"max_model_len": 256},
            "actor": {"concurrent_episodes": 8, "max_turns": 8},
        }
        subprocess.run([sys.executable, "-c", MAKE, str(folder)], cwd=ROOT, check=True, timeout=JOIN_S)
        self.folder = folder / "run"
        self.folder.mkdir()
        self._config = run_folder.with_ports(check(settings, "benchmarks.elastic"))
        run_folder.save_config(self._config, self.folder / run_folder.CONFIG)
        keys = run_folder.prepare_keys(self._config, self.folder)
        self._keys = run_folder.http_keys(self._config, keys)
        self._hosts: dict[int, list[subprocess.Popen[bytes]]] = {}
        self._next = 0
        self._started: list[subprocess.Popen[bytes]] = []
        self._begin("broker")
        self.await_status(lambda status: True)
        self._learner = self._begin("learner")

    def status(self) -> dict[str, Any] | None:
        """Return the broker's answer; None if there is none."""
        try:
            return fetch(self._config.broker.http, keys=self._keys)
        except NoAnswer:
            return None

    def lags(self) -> Counter[int]:
        """Return the tokens that were trained so far, by their lag."""
        try:
            content = json.loads((self.folder / "lags.json").read_text())
        except FileNotFoundError:
            return Counter()
        return Counter({int(lag): count for lag, count in content.items()})

    def look(self) -> "Look":
        """Return what the run has counted.

        Raises:
            TimeoutError: the broker does not answer.
        """
        if (status := self.status()) is None:
            raise TimeoutError("the broker does not answer")
        return Look(counts(status), self.lags(), status["ledger"]["violation"])

    def await_status(self, holds: Any) -> None:
        """Wait until the broker's answer is as it should be."""
        deadline = time.monotonic() + JOIN_S
        while (status := self.status()) is None or not holds(status):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {JOIN_S:g} s; logs are in {self.folder}")
            time.sleep(POLL_S)

    def come(self) -> None:
        """Start a host."""
        number, self._next = self._next, self._next + 1
        self._hosts[number] = [
            self._begin(role, "--name", f"{role}-{number}") for role in ("generator", "actor")
        ]

    def go(self, *, killed: bool) -> None:
        """Let the oldest host go."""
        for process in self._hosts.pop(min(self._hosts)):
            process.send_signal(signal.SIGKILL if killed else signal.SIGTERM)

    def all_there(self) -> None:
        """Wait until all hosts have joined."""
        names = {f"{role}-{number}" for number in self._hosts for role in ("generator", "actor")}
        self.await_status(lambda status: names <= {peer["name"] for peer in status["peers"]})

    def end(self) -> int:
        """End the learner, and return how many units it trained twice."""
        (self.folder / "enough").touch()
        self._learner.wait(JOIN_S)
        return int(json.loads((self.folder / "result.json").read_text())["twice"])

    def kill(self) -> None:
        """Kill everybody."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait(JOIN_S)

    def _begin(self, role: str, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **ENGINE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with open(self.folder / f"{role}.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", ROLE, role, str(self.folder), *arguments],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
            )
        self._started.append(process)
        return process


@contextlib.contextmanager
def fleet_of(hosts: int) -> Iterator[Fleet]:
    """Run a fleet of so many hosts, all of which have joined."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder))
        try:
            for _ in range(hosts):
                fleet.come()
            yield fleet
        finally:
            fleet.kill()


def counts(status: dict[str, Any]) -> dict[str, int]:
    """Return what the ledger says now."""
    ledger = status["ledger"]
    return {
        "trained": ledger["outcomes"]["trained"]["action_tokens"],
        "stale": ledger["outcomes"]["stale"]["action_tokens"],
        "lost": ledger["outcomes"]["lost"]["tokens"],
        "dealt_again": ledger["tasks"].get("lost", 0),
    }


@dataclass(frozen=True)
class Look:
    """What a run had counted at one moment."""

    counts: dict[str, int] = field(default_factory=dict)
    lags: Counter[int] = field(default_factory=Counter)
    violation: str = ""
    """What the ledger says of itself."""


def add(outcome: Outcome, before: Look, fleet: Fleet) -> None:
    """Add what happened since an earlier look."""
    now = fleet.look()
    for name, value in now.counts.items():
        setattr(outcome, name, getattr(outcome, name) + value - before.counts.get(name, 0))
    outcome.lags = dict(Counter(outcome.lags) + (now.lags - before.lags))
    if now.violation:
        outcome.violations.append(now.violation)


def stay(arm: str, seed: int, hosts: int, seconds: float, changes: Sequence[Change]) -> Outcome:
    """Run one fleet, whose hosts come and go as the changes say."""
    outcome = Outcome(arm, seed, seconds, len(changes), host_seconds(changes, hosts, seconds))
    with fleet_of(hosts) as fleet:
        fleet.all_there()
        before, began = fleet.look(), time.monotonic()
        for change in [*changes, None]:
            at = seconds if change is None else change.at
            time.sleep(max(0.0, began + at - time.monotonic()))
            if change is not None and change.comes:
                fleet.come()
            elif change is not None:
                fleet.go(killed=change.killed)
        add(outcome, before, fleet)
        outcome.twice = fleet.end()
    return outcome


def restart(seed: int, hosts: int, seconds: float, changes: Sequence[Change]) -> Outcome:
    """Start the run again at each change, as a fleet of fixed size has to."""
    outcome = Outcome("restart", seed, seconds, len(changes), host_seconds(changes, hosts, seconds))
    began = None
    for change in [*changes, None]:
        with fleet_of(hosts) as fleet:
            end = seconds if change is None else change.at
            if began is None:
                fleet.all_there()
                began = time.monotonic()
                before = fleet.look()
            else:
                before = Look()
            time.sleep(max(0.0, began + end - time.monotonic()))
            # A run that was started again a moment ago may not answer yet, and has trained nothing.
            with contextlib.suppress(TimeoutError):
                add(outcome, before, fleet)
        if change is not None:
            hosts += 1 if change.comes else -1
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of all arms: medians over seeds, with the least and the greatest."""
    rows = [
        "| arm | changes | trained tokens/s and host | relative to static | mean lag of tokens, versions | largest lag "
        "| too stale | dealt again | lost | twice |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    still = {one.seed: one.rate for one in outcomes if one.arm == "static"}
    for arm in ARMS:
        own = [one for one in outcomes if one.arm == arm]
        if not own:
            continue
        stale = sum(one.stale for one in own) / max(1, sum(one.trained + one.stale for one in own))
        sums = [sum(getattr(one, name) for one in own) for name in ("dealt_again", "lost", "twice")]
        rates = spread([one.rate for one in own])
        ratios = "-" if arm == "static" else spread([one.rate / still[one.seed] for one in own])
        lagging = [one.lag for one in own if one.lags]
        lags = f"{spread(lagging)} | {max(max(one.lags, default=0) for one in own)}" if lagging else "- | -"
        changes = sum(one.changes for one in own)
        rows.append(
            f"| {arm} | {changes} | {rates} | {ratios} | {lags} | {stale:.1%} | {' | '.join(map(str, sums))} |"
        )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all arms for all seeds, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="length of each arm; default: 600")
    parser.add_argument(
        "--every", type=float, default=30.0, help="mean time between two changes; default: 30"
    )
    parser.add_argument("--hosts", type=int, default=3, help="hosts at the start; default: 3")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    outcomes: list[Outcome] = []
    for seed in args.seeds:
        changes = trace(seed, args.seconds, args.hosts, args.every)
        for arm in ARMS:
            if arm == "restart":
                outcomes.append(restart(seed, args.hosts, args.seconds, changes))
            else:
                moves = changes if arm == "elastic" else []
                outcomes.append(stay(arm, seed, args.hosts, args.seconds, moves))
            sys.stderr.write(f"{outcomes[-1]}\n")
    found = table(outcomes)
    sys.stdout.write(found + "\n")
    if args.json:
        results = {
            "seconds": args.seconds,
            "every_s": args.every,
            "outcomes": [asdict(one) for one in outcomes],
        }
        save_results(args.json, {"arms": found}, results)


if __name__ == "__main__":
    main()
