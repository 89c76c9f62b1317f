"""A training run: start or resume, learner steps, evaluations, checkpoints."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from learner import run_files
from learner.checkpoint_files import latest_name
from learner.errors import NothingToLearn, Stopped
from learner.evaluations import evaluations_due, is_due
from learner.intake.evaluation import measure
from learner.intake.session import TIME_LIMIT, BrokerSession
from learner.intake.signal_watch import SOLVED
from learner.metrics import rollout_metrics
from learner.publisher import Publisher
from learner.run_files import CHECKPOINTS, Start
from learner.trainer import Totals, Trainer
from protocol.files import write_whole
from protocol.messages.fields import MAX_PATIENCE_S
from protocol.version_line import VersionLine

SLOWEST_BYTES_PER_S = 50e6
"""Rate of a disk that is expected before any write was measured, for example one that is reached over a network."""
SLOWER = 4.0
"""Factor by which a write may be slower than the slowest one so far."""
WRITTEN_BYTES = 16
"""Bytes for each parameter of the model that one write has at most: a checkpoint has 12."""


class WritePatience:
    """Says in heartbeats for how long the learner may write.

    Example:
        >>> now = iter([0.0, 30.0, 100.0, 130.0])
        >>> patience = WritePatience(clock=lambda: next(now))
        >>> with patience.writing(1_000_000_000):
        ...     patience.patience_s
        20.0
        >>> patience.patience_s, patience.writes
        (0.0, 1)
        >>> with patience.writing(1_000_000_000):
        ...     round(patience.patience_s)
        120
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slowest_s_per_byte = 0.0
        # Invariant: the link's thread reads these two numbers; only the learner's own thread changes them.
        self.patience_s = 0.0
        """Seconds that the write may take that is under way; 0 while nothing is written."""
        self.writes = 0
        """Writes that have ended."""

    @contextmanager
    def writing(self, nbytes: int) -> Iterator[None]:
        """Be patient with a write of so many bytes, for at most `protocol.messages.fields.MAX_PATIENCE_S`."""
        began = self._clock()
        slowest = max(1 / SLOWEST_BYTES_PER_S, SLOWER * self._slowest_s_per_byte)
        self.patience_s = min(MAX_PATIENCE_S, nbytes * slowest)
        try:
            yield
        finally:
            seconds = self._clock() - began
            self._slowest_s_per_byte = max(self._slowest_s_per_byte, seconds / max(1, nbytes))
            # The end of a write is progress. It is counted before the patience ends.
            self.writes += 1
            self.patience_s = 0.0


log = logging.getLogger(__name__)

AFTER = "after"
"""Tag of the evaluation at the end."""
REPLAY_FILE = "replay.msgpack"
OPEN_FILE = "open.msgpack"


@dataclass
class Learner(Trainer):
    """A whole run, from its start or a checkpoint to its last evaluation; `learner.main` wires it."""

    exchange: BrokerSession
    publisher: Publisher
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    seconds_before: float = 0.0
    """Wall time, in seconds, of earlier learner processes of this run."""
    ended_by: str = "all steps done"
    writes: WritePatience = field(default_factory=WritePatience)
    saved: tuple[int, int] = (-1, -1)
    """Step and number of evaluations in the newest checkpoint."""

    def train(self, *, continues: bool = False) -> None:
        """Train to the last step, or until the run is asked to end; then write a checkpoint and evaluate.

        Args:
            continues: whether the broker may hold tasks of this lineage that an earlier process put.

        Raises:
            NoData: nothing arrived within the deadline.
            NothingToLearn: everything that arrives fails, or has equal returns.
        """
        self.exchange.while_waiting = self.while_waiting
        try:
            if continues:
                self.exchange.inherit()
            self.evaluate_what_is_due()
            while self.step < self.config.steps:
                self.learn()
                self.evaluate_what_is_due()
        except NothingToLearn:
            # No step reports them.
            arrived = self.exchange.intake.take_recent()
            self.report.write(self.step, rollout_metrics(arrived, []))
            if self.samples is not None:
                self.samples.untrained(self.step, self.version, arrived)
            self.report.write_failures(self.step, self.exchange.intake.signal.failures)
            raise
        except Stopped as reason:
            self.ended_by = str(reason)
            log.info("training ends at step %d: %s", self.step, reason)
        if self.saved != (self.step, len(self.evaluations)):
            self.checkpoint()
        if self.ended_by in ("all steps done", TIME_LIMIT) or self.ended_by.startswith(SOLVED):
            for name in self.config.evaluation_sets:
                self.evaluate(AFTER, name)
        self.settle()
        self.exchange.confirm_commits(step=self.step)

    def while_waiting(self) -> None:
        """End with the error of a publication, if one failed; write a checkpoint if the broker asks for one."""
        self.publisher.check()
        self.checkpoint_if_wanted()

    def after_step(self) -> None:
        """Write a checkpoint and a model if they are due, or a checkpoint if the broker asks for one."""
        if is_due(self.config.export_every, self.step):
            self.write_model(run_files.step_model(self.run_dir, self.step))
        if is_due(self.config.checkpoint_every, self.step):
            self.checkpoint()
        self.checkpoint_if_wanted()

    def evaluate_what_is_due(self) -> None:
        """Evaluate each set before the first step and every so many steps."""
        for tag, name in evaluations_due(self.config, self.evaluations, self.step):
            self.evaluate(tag, name)

    def evaluate(self, tag: str, name: str = "") -> None:
        """Run the held-out tasks of a set with the newest version, and record what comes of them.

        Args:
            tag: when in the run this is.
            name: name of the set; "" for the greedy one of `evaluation_tasks`.
        """
        of, full = self.config.evaluation_sets.get(name), f"{name} {tag}".strip()
        if of is None:
            return
        self.settle()
        try:
            result, episodes = measure(self.exchange, f"{full} {self.step}", of, version=self.version)
        except Stopped as reason:
            if tag != AFTER:
                raise
            self.ended_by = str(reason)
            log.info("evaluation %s left out: %s", full, reason)
            return
        self.evaluations.append(
            result.record(tag=tag, step=self.step, policy_version=self.version, name=name)
        )
        if self.samples is not None:
            # Before the metrics: whoever reads of the evaluation there finds its samples.
            written = self.samples.evaluation(self.step, self.version, full, episodes)
            self.report.write_samples(self.step, [*written, *self.samples.of_last_step])
        self.report.write(self.step, result.scalars(name))
        log.info("evaluation %s: %s", full, result.sentence())
        # The model after the last step is always written, as `model`.
        if tag != AFTER and self.config.keep_best and self.step and name == self.first_set:
            self.keep_if_best()

    @property
    def first_set(self) -> str:
        """Name of the evaluation set that decides which model is the best."""
        return next(iter(self.config.evaluation_sets), "")

    def keep_if_best(self) -> None:
        """Write the present model if its evaluation, the newest, is better than those of all models that are kept.

        The one before stays until a checkpoint knows of the evaluation, so that a crash in between loses neither.
        """
        if not run_files.newest_is_best(self.run_dir, self.evaluations, self.first_set):
            return
        self.write_model(run_files.best_model(self.run_dir, self.step))
        log.info("the best model so far is %s", run_files.best_model(self.run_dir, self.step))
        if not self.config.checkpoint_every:
            self.remove_models()

    def remove_models(self) -> None:
        """Delete models of steps that this process does again, and models that are no longer the best."""
        best = run_files.best_of(run_files.with_model(self.run_dir, self.evaluations), self.first_set)
        run_files.remove_others(
            self.run_dir, best=None if best is None else int(best["step"]), newest=self.step
        )

    def take_over(self, *, always: bool) -> None:
        """Publish the present weights under a version above all that an earlier learner published.

        The line of versions records that the new version continues the version of the checkpoint. That holds
        even if the weights are some unpublished updates ahead of it.

        Args:
            always: whether to publish also where no higher number is needed.
        """
        published, continued = self.publisher.published, self.version
        before = max(self.exchange.version_before, published.version)
        # If a learner died before its first checkpoint, the published line is longer than that of our checkpoint.
        if published.line:
            self.exchange.intake.line = VersionLine(published.line)
        if before > continued or self.unpublished:
            self.version = max(before, continued) + 1
            self.exchange.intake.line.fork(continued, self.version)
        elif not always:
            return
        self.publish()
        self.settle()

    @property
    def wall_seconds(self) -> float:
        """Wall time of the run so far, in seconds."""
        return self.seconds_before + time.monotonic() - self.started

    @property
    def tokens_generated(self) -> int:
        """Action tokens sampled so far.

        The generators' count is some seconds old; the result is at least the number of arrived tokens.
        """
        intake = self.exchange.intake
        return max(intake.sampled_tokens, self.totals.trained_tokens + intake.counts.arrived_tokens)

    def checkpoint(self) -> None:
        """Write a consistent checkpoint: weights, optimizer, RNG, curriculum, committed units and totals.

        See docs/understand/exactly-once.md.
        """
        self.exchange.checkpoint_wanted = ""
        # Commit first, so that a checkpoint never knows of a unit that was not committed.
        self.exchange.flush(step=self.step)
        state = {
            "step": self.step,
            "version": self.version,
            "skipped_in_a_row": self.skipped_in_a_row,
            "unpublished": self.unpublished,
            "curriculum": self.exchange.curriculum.state(),
            "inlet": self.exchange.intake.state(),
            "totals": asdict(self.totals),
            "evaluations": self.evaluations,
            "wall_seconds": self.wall_seconds,
        }
        with self.writes.writing(self.written_bytes):
            self.engine.save(self.checkpoints, state, also=self.save_beside)
        self.remove_models()
        self.exchange.checkpointed(step=self.step)
        self.saved = (self.step, len(self.evaluations))
        log.info("checkpoint at step %d", self.step)

    @property
    def written_bytes(self) -> int:
        """Bytes of a checkpoint or a model, at most."""
        return WRITTEN_BYTES * self.engine.parameters.whole

    def write_model(self, folder: Path) -> None:
        """Write the present model to a folder."""
        with self.writes.writing(self.written_bytes):
            run_files.write_model(folder, self.engine.save_pretrained)

    def checkpoint_if_wanted(self) -> None:
        """Write a checkpoint if the broker wants one because its journal is filling."""
        if self.exchange.checkpoint_wanted:
            log.info("checkpoint out of turn: %s", self.exchange.checkpoint_wanted)
            self.checkpoint()

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.run_dir / CHECKPOINTS

    def save_beside(self, folder: Path) -> None:
        """Write the replay table and the open trajectories into a checkpoint's folder."""
        if self.replay is not None:
            self.replay.save(folder / REPLAY_FILE)
        write_whole(folder / OPEN_FILE, self.exchange.intake.open.encode())

    def start_from(self, start: Start) -> None:
        """Continue from the newest checkpoint, or begin at step 0 with a version above all earlier ones."""
        if start.restores:
            self.restore()
            return
        if start.again:
            self.rewind()
        self.take_over(always=False)

    def rewind(self) -> None:
        """Delete the metrics, samples and models of steps and evaluations that this process does again."""
        self.report.rewind(self.step)
        self.remove_models()
        if self.samples is not None:
            evaluated = {f"{e.get('set', '')} {e['tag']}".strip() for e in self.evaluations}
            self.samples.rewind(self.step, evaluated)

    def restore(self) -> None:
        """Load the newest checkpoint and publish its weights.

        If this process began a new lineage, it also puts the checkpoint's unfinished tasks again.
        """
        state = self.engine.load(self.checkpoints)
        folder = self.checkpoints / latest_name(self.checkpoints)
        if self.replay is not None:
            self.replay.load(folder / REPLAY_FILE)
        intake, curriculum = self.exchange.intake, self.exchange.curriculum
        self.step, self.version = state["step"], state["version"]
        self.skipped_in_a_row, self.unpublished = state["skipped_in_a_row"], state.get("unpublished", 0)
        self.totals, self.evaluations = Totals(**state["totals"]), state["evaluations"]
        self.seconds_before = state["wall_seconds"]
        intake.restore(state["inlet"])
        self.saved = (self.step, len(self.evaluations))
        self.rewind()
        self.take_over(always=True)
        # In lockstep no token may be sampled by weights from before the restart.
        tasks = curriculum.restore(state["curriculum"], self.version if self.exchange.lockstep else 0)
        if curriculum.lineage == state["curriculum"]["lineage"]:
            intake.open.restore((folder / OPEN_FILE).read_bytes())
        else:
            # The broker cancels the tasks of the other lineage; these have new names.
            self.exchange.put_tasks(tasks)
        log.info("resumed at step %d, version %d, epoch %d", self.step, self.version, curriculum.epoch)
