"""A training run: start or resume, learner steps, evaluations, checkpoints."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from learner import run_files
from learner.checkpoint_files import latest_name
from learner.curriculum import SOLVED
from learner.errors import NothingToLearn, Stopped
from learner.evaluations import Evaluations, evaluations_due, full_name, is_due
from learner.intake.session import TIME_LIMIT, BrokerSession
from learner.run_files import CHECKPOINTS, Start
from learner.trainer import Totals, Trainer
from protocol.files import write_whole
from protocol.messages.fields import MAX_PATIENCE_S

log = logging.getLogger(__name__)

ALL_DONE = "all steps done"
GOES_ON = "the run goes on"
"""Why a run ended that has not."""
AFTER = "after"
"""Tag of the evaluation at the end."""
CANDIDATE = "candidate"
"""Folder in the run folder: the model that is being evaluated beside training."""
REPLAY_FILE = "replay.msgpack"
OPEN_FILE = "open.msgpack"
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


class Checkpoints:
    """Checkpoints and models that a run writes, and how it goes on from the newest checkpoint.

    A checkpoint is one consistent cut: weights, optimizer, random generators, curriculum, committed units, replay table
    and totals. See docs/understand/exactly-once.md.

    Args:
        trainer: the position of training, which `restore` sets.
        session: what is committed, and the tasks under way.
        evaluations: their records are part of a checkpoint, and decide which model is the best.
        describe: writes the card of a model into its folder, which has this name in the end.
    """

    def __init__(
        self,
        trainer: Trainer,
        session: BrokerSession,
        evaluations: Evaluations,
        describe: Callable[[Path, str], None],
    ) -> None:
        self._trainer, self._session, self._evaluations = trainer, session, evaluations
        self._describe = describe
        self.writes = WritePatience()
        self._started = time.monotonic()
        self._seconds_before = 0.0
        """Wall time, in seconds, of earlier learner processes of this run."""
        self._saved = (-1, -1)
        """Step and number of evaluations in the newest checkpoint."""

    @property
    def folder(self) -> Path:
        """Folder of checkpoints."""
        return self._trainer.run_dir / CHECKPOINTS

    @property
    def wall_seconds(self) -> float:
        """Wall time of the run so far, in seconds."""
        return self._seconds_before + time.monotonic() - self._started

    def save(self) -> None:
        """Write a checkpoint, and tell the broker that it covers the units committed so far."""
        trainer, session = self._trainer, self._session
        session.checkpoint_wanted = ""
        # A step that a checkpoint covers is not done again, so nobody would write its annotations later.
        if trainer.annotations is not None:
            trainer.annotations.settle()
        # Commit first, so that a checkpoint never knows of a unit that was not committed.
        session.flush(step=trainer.step)
        state = {
            "step": trainer.step,
            "version": trainer.version,
            "skipped_in_a_row": trainer.skipped_in_a_row,
            "unpublished": trainer.unpublished,
            "curriculum": session.curriculum.state(),
            "inlet": session.intake.state(),
            "totals": asdict(trainer.totals),
            "evaluations": self._evaluations.records,
            "wall_seconds": self.wall_seconds,
        }
        with self.writes.writing(self._written_bytes):
            trainer.engine.save(self.folder, state, also=self.save_beside)
        self.remove_models()
        session.checkpointed(step=trainer.step)
        self._saved = self._now
        log.info("checkpoint at step %d", trainer.step)

    def save_if_wanted(self) -> None:
        """Write a checkpoint if the broker wants one because its journal is filling."""
        if self._session.checkpoint_wanted:
            log.info("checkpoint out of turn: %s", self._session.checkpoint_wanted)
            self.save()

    def save_if_behind(self) -> None:
        """Write a checkpoint unless the newest one has the last step and the last evaluation."""
        if self._saved != self._now:
            self.save()

    def save_beside(self, folder: Path) -> None:
        """Write the replay table and the open trajectories into a checkpoint's folder."""
        if self._trainer.replay is not None:
            self._trainer.replay.save(folder / REPLAY_FILE)
        write_whole(folder / OPEN_FILE, self._session.intake.open.encode())

    @property
    def _now(self) -> tuple[int, int]:
        return self._trainer.step, len(self._evaluations.records)

    @property
    def _written_bytes(self) -> int:
        """Bytes of a checkpoint or a model, at most."""
        return WRITTEN_BYTES * self._trainer.engine.parameters.whole

    # --- models ---

    def write_model(self, folder: Path) -> None:
        """Write the present model and its card to a folder, which is there as a whole or not at all."""

        def save(partial: Path) -> None:
            self._trainer.engine.save_pretrained(partial)
            self._describe(partial, folder.name)

        with self.writes.writing(self._written_bytes):
            run_files.write_model(folder, save)

    def write_last_model(self) -> None:
        """Write the model after the last step. No earlier best model stays if the evaluation at the end is the best."""
        trainer, evaluations = self._trainer, self._evaluations
        folder = trainer.run_dir / "model"
        with self.writes.writing(self._written_bytes):
            trainer.engine.save_pretrained(folder)
        self._describe(folder, folder.name)
        name = evaluations.first_set
        last = [e for e in evaluations.records if e.get("set", "") == name][-1:]
        if [e["tag"] for e in last] == [AFTER] and run_files.newest_is_best(
            trainer.run_dir, evaluations.records, name
        ):
            run_files.remove_others(trainer.run_dir, best=None, newest=trainer.step)

    def keep_if_best(self) -> None:
        """Write the present model if its evaluation, the newest, is better than those of all models that are kept.

        The one before stays until a checkpoint knows of the evaluation, so that a crash in between loses neither.
        """
        trainer, evaluations = self._trainer, self._evaluations
        if not run_files.newest_is_best(trainer.run_dir, evaluations.records, evaluations.first_set):
            return
        folder = run_files.best_model(trainer.run_dir, trainer.step)
        self.write_model(folder)
        log.info("the best model so far is %s", folder)
        if not trainer.config.checkpoint_every:
            self.remove_models()

    def write_candidate(self) -> None:
        """Write the model whose evaluation begins now; training goes on, so that it would be gone at the end."""
        self.remove_candidate()
        self.write_model(self._candidate)

    def keep_candidate_if_best(self, step: int) -> None:
        """Keep the candidate as the best model if the newest evaluation says so, else delete it.

        Args:
            step: learner step at which the evaluation began.
        """
        trainer, evaluations = self._trainer, self._evaluations
        best = run_files.newest_is_best(trainer.run_dir, evaluations.records, evaluations.first_set)
        if best and self._candidate.is_dir():
            folder = run_files.best_model(trainer.run_dir, step)
            folder.parent.mkdir(exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            # Its card was written before the evaluation that made it the best one.
            self._describe(self._candidate, folder.name)
            self._candidate.replace(folder)
            log.info("the best model so far is %s", folder)
            if not trainer.config.checkpoint_every:
                self.remove_models()
        self.remove_candidate()

    def describe_again(self, step: int) -> None:
        """Write the card of the model that was exported at a step once more, because the step has a new result."""
        folder = run_files.step_model(self._trainer.run_dir, step)
        if folder.is_dir():
            self._describe(folder, folder.name)

    def remove_candidate(self) -> None:
        """Delete a model whose evaluation is over, or of which a crash lost the evaluation."""
        shutil.rmtree(self._candidate, ignore_errors=True)

    @property
    def _candidate(self) -> Path:
        return self._trainer.run_dir / CANDIDATE

    def remove_models(self) -> None:
        """Delete models of steps that this process does again, and models that are no longer the best."""
        trainer, evaluations = self._trainer, self._evaluations
        kept = run_files.with_model(trainer.run_dir, evaluations.records)
        best = run_files.best_of(kept, evaluations.first_set)
        run_files.remove_others(
            trainer.run_dir, best=None if best is None else int(best["step"]), newest=trainer.step
        )

    # --- going on ---

    def restore(self) -> None:
        """Load the newest checkpoint and publish its weights.

        If this process began a new lineage, it also puts the checkpoint's unfinished tasks again.
        """
        trainer, intake, curriculum = self._trainer, self._session.intake, self._session.curriculum
        state = trainer.engine.load(self.folder)
        folder = self.folder / latest_name(self.folder)
        if trainer.replay is not None:
            trainer.replay.load(folder / REPLAY_FILE)
        trainer.step, trainer.version = state["step"], state["version"]
        trainer.skipped_in_a_row, trainer.unpublished = state["skipped_in_a_row"], state.get("unpublished", 0)
        trainer.totals, self._evaluations.records = Totals(**state["totals"]), state["evaluations"]
        self._seconds_before = state["wall_seconds"]
        intake.restore(state["inlet"])
        self._saved = self._now
        self.rewind()
        for text in trainer.engine.changed_formulas:
            trainer.report.note(trainer.step, text)
        trainer.take_over(always=True)
        # In lockstep no token may be sampled by weights from before the restart.
        tasks = curriculum.restore(state["curriculum"], trainer.version if self._session.lockstep else 0)
        if curriculum.lineage == state["curriculum"]["lineage"]:
            intake.open.restore((folder / OPEN_FILE).read_bytes())
        else:
            # The broker cancels the tasks of the other lineage; these have new names.
            self._session.put_tasks(tasks)
        log.info("resumed at step %d, version %d, epoch %d", trainer.step, trainer.version, curriculum.epoch)

    def rewind(self) -> None:
        """Delete the metrics, samples, annotations and models of steps and evaluations that this process does again."""
        trainer = self._trainer
        trainer.report.rewind(trainer.step)
        if trainer.annotations is not None:
            trainer.annotations.rewind(trainer.step)
        self.remove_candidate()
        self.remove_models()
        if trainer.samples is not None:
            records = self._evaluations.records
            evaluated = {f"{e.get('set', '')} {e['tag']}".strip() for e in records}
            trainer.samples.rewind(trainer.step, evaluated)


class TrainingRun:
    """A whole run, from its start or a checkpoint to its last evaluation; `learner.main` wires it.

    Args:
        trainer: does the learner steps, with batches of the session.
        session: connection to the broker.
    """

    def __init__(self, trainer: Trainer, session: BrokerSession) -> None:
        self.trainer, self.session = trainer, session
        self.evaluations = Evaluations(trainer.config, session, trainer.report, trainer.samples)
        self.checkpoints = Checkpoints(trainer, session, self.evaluations, self._write_card)
        self.ended_by = GOES_ON
        self.describe: Callable[[Path, str, Mapping[str, Any]], None] | None = None
        """Writes the card of a model: its folder, its name, and `facts`; None: models have no cards."""

    def start_from(self, start: Start) -> None:
        """Continue from the newest checkpoint, or begin at step 0 with a version above all earlier ones."""
        if start.restores:
            self.checkpoints.restore()
            return
        if start.again:
            self.checkpoints.rewind()
        self.trainer.take_over(always=False)

    def train(self, *, continues: bool = False) -> None:
        """Train to the last step, or until the run is asked to end; then write a checkpoint and evaluate.

        Args:
            continues: whether the broker may hold tasks of this lineage that an earlier process put.

        Raises:
            NoData: nothing arrived within the deadline.
            NothingToLearn: everything that arrives fails, or has equal returns.
        """
        trainer, session = self.trainer, self.session
        session.while_waiting = self.while_waiting
        try:
            if continues:
                session.inherit()
            self.evaluate_what_is_due()
            while trainer.step < trainer.config.steps:
                self.learn()
                self.evaluate_what_is_due()
            self.ended_by = ALL_DONE
        except NothingToLearn:
            trainer.report_untrained()
            raise
        except Stopped as reason:
            self.ended_by = str(reason)
            log.info("training ends at step %d: %s", trainer.step, reason)
            trainer.write_first_group()
        self.finish_evaluations()
        self.checkpoints.save_if_behind()
        if self.ended_by in (ALL_DONE, TIME_LIMIT) or self.ended_by.startswith(SOLVED):
            for name in trainer.config.evaluation_sets:
                self.evaluate(AFTER, name)
        trainer.settle()
        session.confirm_commits(step=trainer.step)

    def learn(self) -> None:
        """Do one learner step, then write what is due; both count as the time of the step."""
        trainer, started = self.trainer, time.monotonic()
        trainer.learn()
        if is_due(trainer.config.export_every, trainer.step):
            self.checkpoints.write_model(run_files.step_model(trainer.run_dir, trainer.step))
        if is_due(trainer.config.checkpoint_every, trainer.step):
            self.checkpoints.save()
        self.checkpoints.save_if_wanted()
        trainer.totals.step_seconds += time.monotonic() - started

    def while_waiting(self) -> None:
        """Do what cannot wait for the next step.

        End with the error of a publication, if one failed; write samples of the first group, and a checkpoint if the
        broker asks for one.
        """
        self.trainer.publisher.check()
        self.trainer.write_first_group()
        self.checkpoints.save_if_wanted()

    def evaluate_what_is_due(self) -> None:
        """Evaluate each set before the first step and every so many steps.

        Generators that only evaluate do it while the learner trains, where there are some. At most one evaluation is
        under way: the learner waits for it before it begins the next one, because a generator has one version.
        """
        trainer, evaluations = self.trainer, self.evaluations
        if evaluations.beside is not None:
            self.take_evaluations()
        due = evaluations_due(trainer.config, [*evaluations.records, *evaluations.pending], trainer.step)
        if due and evaluations.pending:
            self.finish_evaluations()
        for tag, name in due:
            if evaluations.beside is None:
                self.evaluate(tag, name)
            else:
                self.begin_evaluation(tag, name)

    def begin_evaluation(self, tag: str, name: str) -> None:
        """Begin an evaluation beside training, and keep its version and, for the best model, its weights."""
        trainer, evaluations = self.trainer, self.evaluations
        trainer.publisher.pinned = trainer.version
        if trainer.config.keep_best and trainer.step and name == evaluations.first_set:
            self.checkpoints.write_candidate()
        evaluations.begin(tag, name, step=trainer.step, version=trainer.version)

    def take_evaluations(self, stood_s: float = 0.0) -> None:
        """Record the evaluations beside training that are over."""
        trainer, evaluations = self.trainer, self.evaluations
        for ended in evaluations.take_ended(step=trainer.step, version=trainer.version, stood_s=stood_s):
            if ended.name == evaluations.first_set and not ended.again:
                self.checkpoints.keep_candidate_if_best(ended.step)
            self.checkpoints.describe_again(ended.step)
        pinned = [one.version for one in evaluations.under_way]
        trainer.publisher.pinned = min(pinned, default=None)

    def finish_evaluations(self) -> None:
        """Wait for the evaluations beside training. A run that is asked to end leaves them out."""
        evaluations = self.evaluations
        while evaluations.beside is not None and evaluations.under_way:
            one, began = evaluations.under_way[0], time.monotonic()
            try:
                evaluations.beside.await_evaluation(one.tasks_name, one.tasks)
            except Stopped as reason:
                log.info("%s", reason)
                evaluations.give_up()
                break
            self.take_evaluations(time.monotonic() - began)
        self.checkpoints.remove_candidate()

    def evaluate(self, tag: str, name: str = "") -> None:
        """Run the held-out tasks of a set with the newest version, and record what comes of them.

        Args:
            tag: when in the run this is.
            name: name of the set; "" for the greedy one of `evaluation_tasks`.
        """
        trainer = self.trainer
        if name not in trainer.config.evaluation_sets:
            return
        trainer.settle()
        try:
            self.evaluations.evaluate(tag, name, step=trainer.step, version=trainer.version)
        except Stopped as reason:
            if tag != AFTER:
                raise
            self.ended_by = str(reason)
            log.info("evaluation %s left out: %s", full_name(tag, name), reason)
            return
        # The model after the last step is always written, as `model`.
        best_counts = tag != AFTER and trainer.config.keep_best and trainer.step
        if best_counts and name == self.evaluations.first_set:
            self.checkpoints.keep_if_best()
        self.checkpoints.describe_again(trainer.step)

    def _write_card(self, folder: Path, name: str) -> None:
        if self.describe is None:
            return
        try:
            self.describe(folder, name, self.facts())
        except OSError as error:
            log.warning("%s has no model card: %s", folder, error)

    def facts(self) -> dict[str, Any]:
        """Return what came of the run so far, the part of ``result.json`` that model cards show."""
        trainer, totals = self.trainer, self.trainer.totals
        lags = {int(lag): count for lag, count in totals.lag_counts.items()}
        return {
            "ended_by": self.ended_by,
            "steps": trainer.step,
            "policy_version": trainer.version,
            "evaluations": self.evaluations.records,
            "tokens_trained": totals.trained_tokens,
            "tokens_generated": self.tokens_generated,
            "policy_lag": {
                "mean_versions": sum(lag * n for lag, n in lags.items()) / max(1, sum(lags.values())),
                "max_versions": max(lags, default=0),
                "tokens_by_lag": {str(lag): lags[lag] for lag in sorted(lags)},
            },
        }

    @property
    def tokens_generated(self) -> int:
        """Action tokens sampled so far.

        The generators' count is some seconds old, and one that is killed takes its own along. So the result is at
        least the number of arrived tokens.
        """
        intake, totals = self.session.intake, self.trainer.totals
        # The checkpoint of an earlier version does not know what masks have left out.
        taken = max(totals.taken_tokens, totals.trained_tokens)
        return max(intake.sampled_tokens, taken + intake.counts.arrived_tokens)
