"""One timed learner of the real system, for `benchmarks.async_vs_sync`."""

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.async_vs_sync.processor_time import cpu_seconds, idle_share
from benchmarks.envs.known_work import WorkSuite
from benchmarks.report import measured
from benchmarks.staleness.lag_parts import BudgetedCurriculum
from benchmarks.staleness.lag_system import System
from launch.run_file.sections import RunConfig
from learner.errors import Stopped
from learner.intake.session import Exchange
from learner.metrics import Report
from learner.process import join
from learner.publisher import Publisher
from learner.run import Learner
from learner.run_files import next_epoch
from learner.settings.learner import LearnerConfig
from learner.trainer import Totals
from learner.update.engine import TrainingEngine
from learner.weight_copy import OutgoingWeights
from protocol.session import Progress


@dataclass(frozen=True)
class Step:
    """Figures of one finished learner step."""

    time: float
    """Seconds since the clock was started."""
    tokens: int
    """Action tokens trained since the clock was started."""
    waited: float
    """Seconds of the step spent waiting for a batch."""
    updated: float
    """Seconds of forward and backward passes and the optimizer."""
    reward: float | None
    """Mean return of the training trajectories that arrived; None if none did."""


@dataclass(frozen=True)
class Snapshot:
    """Held-out reward of the weights at one moment, evaluated after the clock was stopped."""

    time: float
    step: int
    reward: float


@dataclass(frozen=True)
class Run:
    """Results of one learner."""

    arm: str
    mode: str
    seed: int
    settings: str
    """Fingerprint of the settings. A table holds only runs with equal fingerprints."""
    seconds: float
    steps: list[Step]
    snapshots: list[Snapshot]
    idle_learner: float
    """Share of ``seconds`` in which the learner waited for a batch."""
    idle_generator: float
    """Share of the seconds in which the generator ran no request."""
    running_requests: float
    episodes_running: float
    """Mean over the steps, like ``running_requests``."""
    tokens_per_trajectory: float
    lag_mean: float
    lag_max: int
    stale_tokens: float
    """Share of the action tokens in batches that were too stale to train on."""
    cpu: dict[str, float] = field(default_factory=dict)
    """Cores that each role kept busy, and, as "others", those that other work on the machine kept busy."""


class TimedLearner(Learner):
    """A learner that keeps step times and copies of its weights from `begin` on."""

    keep_steps, keep_seconds = 1, 1.0
    """Steps and seconds between two copies of the weights, whichever comes first."""
    gauges: list[dict[str, float]]

    def begin(self) -> None:
        """Start the clock. All roles are up, and the first weights have been evaluated."""
        self.totals, self.timed, self.kept = (
            Totals(),
            list[Step](),
            list[tuple[float, int, OutgoingWeights]](),
        )
        self.gauges, self.first_step = [self.exchange.intake.gauges], self.step
        self.began = time.monotonic()

    def record(self, report: Any, trained: Any, updated: int, waited: float, wall: float) -> None:
        """Note the step for the benchmark, then record it as every learner does."""
        if hasattr(self, "began"):
            arrived = [t.return_ for t in self.exchange.intake.recent if t.status != "failed"]
            now = time.monotonic() - self.began
            self.timed.append(
                Step(
                    time=now,
                    tokens=self.totals.trained_tokens,
                    waited=waited,
                    updated=report.metrics["learner/step_seconds"],
                    reward=sum(arrived) / len(arrived) if arrived else None,
                )
            )
            self.gauges.append(self.exchange.intake.gauges)
            done = self.step - self.first_step
            last = self.kept[-1] if self.kept else (0.0, 0)
            if now - last[0] >= self.keep_seconds or done - last[1] >= self.keep_steps:
                self.kept.append((now, done, self.copy()))
        super().record(report, trained, updated, waited, wall)

    def copy(self) -> OutgoingWeights:
        """Return a copy of the current weights."""
        weights = self.engine.weights()
        return OutgoingWeights(weights.shapes, [(name, tensor.clone()) for name, tensor in weights.tensors])

    def judge(self) -> list[Snapshot]:
        """Publish the kept weights one after the other, and evaluate each."""
        found = [Snapshot(0.0, 0, measured(self.evaluations[0], "return_mean"))]
        for moment, done, weights in self.kept:
            self.version += 1
            self.publisher.publish(self.version, weights, announce=self.exchange.announce)
            self.evaluate(f"snapshot {done}")
            found.append(Snapshot(moment, done, measured(self.evaluations[-1], "return_mean")))
        return found


def train(system: System, config: RunConfig, *, arm: str, settings: str, steps: int, kept: int) -> Run:
    """Run one learner: evaluate, start the clock, train, stop the clock, evaluate the kept weights."""
    mode, seed = config.run.mode, config.run.seed
    learner_config = config.learner.model_copy(update={"max_policy_lag": config.max_policy_lag})
    engine = TrainingEngine(learner_config, model=system.model, total_steps=learner_config.steps, seed=seed)
    epoch = next_epoch(system.folder)
    link = join(
        learner_config, system.config.broker.endpoint, system.folder.name, epoch=epoch, progress=Progress
    )
    report = Report(system.folder)
    publisher = Publisher(system.folder.name, system.folder, epoch=epoch, keep=learner_config.keep_versions)
    deadline = float("inf")
    curriculum = _curriculum(config, learner_config, epoch)
    try:
        exchange = Exchange(
            link,
            curriculum,
            learner_config,
            lockstep=mode == "sync",
            stop_reason=lambda: system.stop_reason(deadline),
        )
        learner = TimedLearner(learner_config, system.folder, engine, exchange, publisher, report, seed=seed)
        learner.keep_steps, learner.keep_seconds = max(1, steps // kept), config.run.max_minutes * 60 / kept
        learner.take_over(always=True)
        learner.evaluate("before")
        used = cpu_seconds(system)
        learner.begin()
        deadline = learner.began + config.run.max_minutes * 60
        with contextlib.suppress(Stopped):
            while learner.step < steps:
                learner.learn()
        seconds = time.monotonic() - learner.began
        used = {role: (cpu - used.get(role, 0.0)) / seconds for role, cpu in cpu_seconds(system).items()}
        snapshots = learner.judge()
    finally:
        link.close("done")
        report.close()
        publisher.close()
        engine.release()
    return _outcome(learner, arm, settings, config, seconds, snapshots, used)


def _curriculum(config: RunConfig, learner_config: LearnerConfig, epoch: int) -> BudgetedCurriculum:
    """Return tasks that depend on the seed alone, each with the length that the suite gives it, if it does."""
    first = config.run.seed * 1_000_000
    curriculum = BudgetedCurriculum(config.env.name, learner_config, epoch, next_index=first)
    suite = WorkSuite(**config.env.params)
    curriculum.budget = suite.budget if suite.budgeted else None
    return curriculum


def _outcome(
    learner: TimedLearner,
    arm: str,
    settings: str,
    config: RunConfig,
    seconds: float,
    snapshots: list[Snapshot],
    cpu: dict[str, float],
) -> Run:
    text = (learner.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if "learner/policy_version" in line]
    lags = {int(lag): count for lag, count in learner.totals.lag_counts.items()}
    trajectories = max(1, learner.totals.trained_trajectories)

    def mean(name: str) -> float:
        return float(sum(line.get(name, 0.0) for line in lines) / max(1, len(lines)))

    return Run(
        arm=arm,
        mode=config.run.mode,
        seed=config.run.seed,
        settings=settings,
        seconds=seconds,
        steps=learner.timed,
        snapshots=snapshots,
        idle_learner=sum(step.waited for step in learner.timed) / seconds,
        idle_generator=idle_share(learner.gauges[0], learner.gauges[-1]),
        running_requests=mean("generator/running_requests"),
        episodes_running=mean("actor/episodes_running"),
        tokens_per_trajectory=learner.totals.trained_tokens / trajectories,
        lag_mean=sum(lag * n for lag, n in lags.items()) / max(1, sum(lags.values())),
        lag_max=max(lags, default=0),
        stale_tokens=mean("learner/stale_token_fraction"),
        cpu=cpu,
    )


def read(lines: Sequence[str]) -> list[Run]:
    """Return the runs of the lines of a JSON Lines file."""
    found = []
    for values in map(json.loads, lines):
        values["steps"] = [Step(**step) for step in values["steps"]]
        values["snapshots"] = [Snapshot(**snapshot) for snapshot in values["snapshots"]]
        found.append(Run(**values))
    return found
