"""The training loop: collect whole groups, update, publish the new version, commit, report."""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from learner.algorithms.replay import self_imitation_weight
from learner.checkpoint import latest_name
from learner.config import LearnerConfig
from learner.errors import Diverged, Stopped
from learner.intake.exchange import TIME_LIMIT, Exchange
from learner.lineage import Start
from learner.metrics import SCALARS, Report, rollout_metrics
from learner.nonfinite import save_trajectories
from learner.publisher import Publisher
from learner.replay.batch import batch_metrics, mix, remember
from learner.replay.table import ReplayTable
from learner.run_files import CHECKPOINTS
from learner.totals import Totals
from learner.trajectory import Trajectory
from learner.units import RECOMMITTED, Unit
from learner.update.engine import TrainingEngine, UpdateReport
from protocol.version_line import VersionLine
from protocol.whole_files import write_whole

log = logging.getLogger(__name__)

AFTER = "after"
REPLAY_FILE = "replay.msgpack"
OPEN_FILE = "open.msgpack"


@dataclass
class Learner:
    """The parts of a learner, wired in `learner.main`, and where it stands."""

    config: LearnerConfig
    run_dir: Path
    engine: TrainingEngine
    exchange: Exchange
    publisher: Publisher
    report: Report
    replay: ReplayTable[Any] | None = None
    seed: int = 0
    step: int = 0
    version: int = 0
    skipped_in_a_row: int = 0
    unpublished: int = 0
    """Updates since weights were published."""
    totals: Totals = field(default_factory=Totals)
    evaluations: list[dict[str, float | str]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    seconds_before: float = 0.0
    """Wall time of this run's earlier learners, in seconds."""
    ended_by: str = "all steps done"
    saved: tuple[int, int] = (-1, -1)
    """Step and number of evaluations in the newest checkpoint."""

    def train(self, *, continues: bool = False) -> None:
        """Run to the last step, or until asked to end; then checkpoint and evaluate.

        Args:
            continues: the broker may hold tasks of this lineage, put by the process before this one.
        """
        self.exchange.between = self.checkpoint_if_wanted
        try:
            if continues:
                self.exchange.inherit()
            self.evaluate_what_is_due()
            while self.step < self.config.steps:
                self.learn()
                self.evaluate_what_is_due()
        except Stopped as reason:
            self.ended_by = str(reason)
            log.info("training ends at step %d: %s", self.step, reason)
        if self.saved != (self.step, len(self.evaluations)):
            self.checkpoint()
        if self.ended_by in ("all steps done", TIME_LIMIT):
            self.evaluate(AFTER)
        self.exchange.settle(step=self.step)

    def learn(self) -> None:
        """One step."""
        started = time.monotonic()
        updated = self.version
        groups = self.exchange.collect(step=self.step, version=updated)
        waited = time.monotonic() - started
        trajectories = self.batch(groups)
        report = self.engine.update(trajectories, current_version=updated)
        self.step += 1
        if report.applied:
            self.applied(report, groups)
        elif self.exchange.in_step:
            self.next_version()  # of the same weights: trajectories wait for one at the end of their windows
        if report.nonfinite:
            self.skipped(trajectories)
        else:
            self.skipped_in_a_row = 0
        self.exchange.commit(groups, step=self.step, version=updated, replayed_tokens=report.replayed_tokens)
        if self.step < self.config.steps:
            self.exchange.refill(step=self.step, version=self.version)
        self.exchange.inlet.check()
        self.record(report, trajectories, updated, waited, time.monotonic() - started)
        if self.config.checkpoint_every and self.step % self.config.checkpoint_every == 0:
            self.checkpoint()
        self.checkpoint_if_wanted()
        self.totals.step_seconds += time.monotonic() - started

    def evaluate_what_is_due(self) -> None:
        """Before the first step, and every so many; also what a crash has left out after a checkpoint."""
        every = self.config.evaluation_every
        if not self.evaluations:
            self.evaluate("before")
        elif every and self.step % every == 0 and self.evaluations[-1]["step"] != self.step:
            self.evaluate(f"step {self.step}")

    def batch(self, groups: Sequence[Unit]) -> list[Trajectory]:
        """What to train on: the groups, and what is replayed with them."""
        fresh = [t for group in groups for t in group.trajectories]
        if self.replay is None:
            return fresh
        weight = self_imitation_weight(self.step, warmup_steps=self.replay.config.warmup_steps)
        if not weight:
            return fresh
        rng = np.random.default_rng([self.seed, self.step])  # a restart draws the same again
        return mix(self.replay, groups, step=self.step, version=self.version, rng=rng, weight=weight)

    def applied(self, report: UpdateReport, groups: Sequence[Unit]) -> None:
        """The weights have changed: count, remember for replay, and publish the next version."""
        self.unpublished += 1
        self.totals.add(report, sum(len(group.trajectories) for group in groups))
        if self.replay is not None and not report.nonfinite:
            remember(self.replay, groups, step=self.step - 1)
        if self.step % self.config.publish_every == 0:
            self.next_version()

    def next_version(self) -> None:
        """The weights as they are get the next number."""
        self.version += 1
        self.publish()

    def publish(self) -> None:
        """Write the current weights as the newest version and announce them, with the restarts behind them."""
        line = self.exchange.inlet.line.forks
        self.exchange.announce(self.publisher.publish(self.version, *self.engine.weights(), line=line))
        self.unpublished = 0
        self.totals.publish_seconds += self.publisher.seconds

    def skipped(self, trajectories: Sequence[Trajectory]) -> None:
        """Loss or gradient was not finite: the weights are untouched, the trajectories kept for inspection."""
        self.totals.skipped_steps += 1
        self.skipped_in_a_row += 1
        path = save_trajectories(self.run_dir / "nonfinite", self.step, trajectories)
        log.error("step %d skipped, loss or gradient not finite; its trajectories are in %s", self.step, path)
        if self.skipped_in_a_row >= self.config.max_nonfinite_steps:
            raise Diverged(
                f"{self.skipped_in_a_row} steps in a row had a loss or gradient that is not finite; their "
                f"trajectories are in {path.parent}. Lower learner.optimizer.lr, or look for a reward or "
                "log-probability out of range there"
            )

    def record(
        self, report: UpdateReport, trained: Sequence[Trajectory], updated: int, waited: float, wall: float
    ) -> None:
        """TensorBoard and metrics.jsonl, of a step that updated the policy of version ``updated``."""
        inlet = self.exchange.inlet
        self.totals.wait_seconds += waited
        self.totals.update_seconds += report.metrics["learner/step_seconds"]
        arrived = inlet.take_recent()
        scalars = {
            **{name: value for name, value in inlet.gauges.items() if name in SCALARS},
            **report.metrics,
            **rollout_metrics(arrived, trained),
            **self.replay_metrics(trained, updated),
            "rollout/failed_trajectories": float(inlet.counts.total("failed", "rejected", "broken")),
            "rollout/uniform_trajectories": float(inlet.counts.total("uniform")),
            "rollout/stale_trajectories": float(inlet.counts.total("stale", "dropped_stale")),
            "rollout/recommitted_trajectories": float(inlet.counts.total(RECOMMITTED)),
            "learner/wait_seconds": waited,
            "learner/publish_seconds": self.publisher.seconds,
            "learner/idle_share": waited / wall,
            "learner/trained_tokens_per_second": report.metrics["learner/trained_tokens"] / wall,
            "learner/tokens_trained_total": float(self.totals.trained_tokens),
            "learner/tokens_replayed_total": float(self.totals.replayed_tokens),
            "learner/policy_version": float(self.version),
            "learner/skipped_steps": float(self.totals.skipped_steps),
        }
        arrived_lengths = np.array([t.action_tokens for t in arrived])
        self.report.write(
            self.step, scalars, {**report.histograms, "length_generated_tokens": arrived_lengths}
        )

    def replay_metrics(self, trained: Sequence[Trajectory], updated: int) -> dict[str, float]:
        """Of the replay table and the batch, if there is a table."""
        if self.replay is None:
            return {}
        return self.replay.metrics() | batch_metrics(trained, version=updated)

    def evaluate(self, tag: str) -> None:
        """Greedy accuracy on held-out tasks under the newest version."""
        if not self.config.evaluation_tasks:
            return
        try:
            episodes = self.exchange.evaluate(f"{tag} {self.step}", version=self.version)
        except Stopped as reason:
            if tag != AFTER:
                raise
            self.ended_by = str(reason)
            log.info("evaluation %s left out: %s", tag, reason)
            return
        accuracy = float(np.mean([t is not None and t.correct is True for t in episodes]))
        return_mean = float(np.mean([0.0 if t is None else t.return_ for t in episodes]))
        self.evaluations.append(
            {
                "tag": tag,
                "step": self.step,
                "policy_version": self.version,
                "tasks": len(episodes),
                "accuracy": accuracy,
                "return_mean": return_mean,
                "failed": sum(t is None or t.status == "failed" for t in episodes),
            }
        )
        self.report.write(self.step, {"evaluation/accuracy": accuracy, "evaluation/return_mean": return_mean})
        log.info("evaluation %s: accuracy %.3f on %d held-out tasks", tag, accuracy, len(episodes))

    def take_over(self, *, always: bool) -> None:
        """Publish what we hold, under a version above all that an earlier learner published.

        It continues the version of our checkpoint; also where our weights are some updates ahead of that one, which is
        published already.
        """
        published, continued = self.publisher.published, self.version
        before = max(self.exchange.version_before, published.version)
        if published.line:  # longer than that of a checkpoint, where a learner died before its first
            self.exchange.inlet.line = VersionLine(published.line)
        if before > continued or self.unpublished:
            self.version = max(before, continued) + 1
            self.exchange.inlet.line.fork(continued, self.version)
        elif not always:
            return
        self.publish()

    @property
    def wall_seconds(self) -> float:
        """Wall time of the run so far."""
        return self.seconds_before + time.monotonic() - self.started

    @property
    def tokens_generated(self) -> int:
        """Action tokens sampled so far: what generators say, which is seconds old, and at least what arrived."""
        inlet = self.exchange.inlet
        return max(inlet.sampled_tokens, self.totals.trained_tokens + inlet.counts.arrived_tokens)

    def checkpoint(self) -> None:
        """One cut of weights, optimizer, RNG, curriculum, committed units and totals; docs/exactly-once.md."""
        self.exchange.checkpoint_wanted = ""
        self.exchange.flush(step=self.step)  # a checkpoint knows of nothing that was never committed
        state = {
            "step": self.step,
            "version": self.version,
            "skipped_in_a_row": self.skipped_in_a_row,
            "unpublished": self.unpublished,
            "curriculum": self.exchange.curriculum.state(),
            "inlet": self.exchange.inlet.state(),
            "totals": asdict(self.totals),
            "evaluations": self.evaluations,
            "wall_seconds": self.wall_seconds,
        }
        self.engine.save(self.checkpoints, state, also=self.save_beside)
        self.exchange.checkpointed(step=self.step)
        self.saved = (self.step, len(self.evaluations))
        log.info("checkpoint at step %d", self.step)

    def checkpoint_if_wanted(self) -> None:
        """A checkpoint out of turn, because the broker's journal is filling."""
        if self.exchange.checkpoint_wanted:
            log.info("checkpoint out of turn: %s", self.exchange.checkpoint_wanted)
            self.checkpoint()

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.run_dir / CHECKPOINTS

    def save_beside(self, folder: Path) -> None:
        """Put the replay table and the open trajectories into a checkpoint."""
        if self.replay is not None:
            self.replay.save(folder / REPLAY_FILE)
        write_whole(folder / OPEN_FILE, self.exchange.inlet.open.encode())

    def start_from(self, start: Start) -> None:
        """Continue from the newest checkpoint, or begin at step 0, and publish what is above earlier versions."""
        if start.restores:
            self.restore()
            return
        if start.again:
            self.report.rewind(0)
        self.take_over(always=False)

    def restore(self) -> None:
        """Continue from the newest checkpoint: publish what we hold, put again what was under way."""
        state = self.engine.load(self.checkpoints)
        folder = self.checkpoints / latest_name(self.checkpoints)
        if self.replay is not None:
            self.replay.load(folder / REPLAY_FILE)
        inlet, curriculum = self.exchange.inlet, self.exchange.curriculum
        self.step, self.version = state["step"], state["version"]
        self.skipped_in_a_row, self.unpublished = state["skipped_in_a_row"], state.get("unpublished", 0)
        self.totals, self.evaluations = Totals(**state["totals"]), state["evaluations"]
        self.seconds_before = state["wall_seconds"]
        inlet.restore(state["inlet"])
        self.saved = (self.step, len(self.evaluations))
        self.report.rewind(self.step)
        self.take_over(always=True)
        # in lockstep no token may be sampled by weights from before the restart
        tasks = curriculum.restore(state["curriculum"], self.version if self.exchange.lockstep else 0)
        if curriculum.lineage == state["curriculum"]["lineage"]:
            inlet.open.restore((folder / OPEN_FILE).read_bytes())
        else:  # those of another lineage have other names, and the broker lets go of them
            self.exchange.put(tasks)
        log.info("resumed at step %d, version %d, epoch %d", self.step, self.version, curriculum.epoch)
