"""Evaluations: which are due in a run, and the learner role of `offbeat eval`, which evaluates and trains nothing."""

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner.checkpoint_files import verify_latest
from learner.curriculum import Curriculum
from learner.errors import Stopped
from learner.gauges import STOOD, evaluation_tag
from learner.intake.evaluation import (
    EvaluationResult,
    Evaluator,
    EvaluatorBeside,
    measure,
    result_of,
    sampled_by,
)
from learner.intake.session import BrokerSession
from learner.metrics import Report
from learner.process import SharedGpu, Stop, end_by_error, end_of_run, join, lead, leave
from learner.publisher import Publisher
from learner.run_files import CHECKPOINTS, PID_FILE, RESULT, find_start
from learner.sample_log import SampleLog
from learner.settings.learner import LearnerConfig
from learner.trajectory import Trajectory
from protocol.files import write_whole
from protocol.messages.episodes import Task
from protocol.messages.fields import RunEnd
from protocol.processes import lock_of_environment
from protocol.session import Progress

if TYPE_CHECKING:
    from learner.update.engine import TrainingEngine

log = logging.getLogger(__name__)

ONLY = "eval"
"""Tag of evaluations of a process that trains nothing."""


def is_due(every: int, step: int) -> bool:
    """Return whether something that happens every so many learner steps happens at this one; 0: never.

    Example:
        >>> is_due(10, 20), is_due(10, 25), is_due(0, 20)
        (True, False, False)
    """
    return bool(every) and step % every == 0


def evaluations_due(
    config: LearnerConfig, evaluations: Sequence[Mapping[str, Any]], step: int
) -> list[tuple[str, str]]:
    """Return tag and set of each evaluation that is due: before the first step, and every so many steps.

    The last step has none of its own, because the evaluation at the end follows. An evaluation that a crash or the end
    of a process prevented is made up for at the step with which the run goes on: one beside training may be lost some
    steps behind its own.

    Args:
        evaluations: records of the evaluations so far.
        step: learner steps done.

    Example:
        >>> config = LearnerConfig(steps=20, evaluation_every=10)
        >>> seen = [{"set": "", "step": 0}]
        >>> evaluations_due(config, [], 0), evaluations_due(config, seen, 10), evaluations_due(config, seen, 20)
        ([('before', '')], [('step 10', '')], [])
        >>> evaluations_due(config, seen, 9), evaluations_due(config, seen, 12)
        ([], [('step 12', '')])
    """
    due = []
    for name, of in config.evaluation_sets.items():
        every = config.evaluation_every if of.every is None else of.every
        # An earlier version wrote no names: it had one set.
        steps = [e["step"] for e in evaluations if e.get("set", "") == name]
        if not steps:
            due.append(("before", name))
        elif every and step < config.steps and steps[-1] < step - step % every:
            due.append((f"step {step}", name))
    return due


def full_name(tag: str, name: str) -> str:
    """Return how an evaluation is called: its set, then its tag.

    Example:
        >>> full_name("before", ""), full_name("step 20", "hard")
        ('before', 'hard step 20')
    """
    return f"{name} {tag}".strip()


@dataclass
class PendingEvaluation:
    """An evaluation that generators of its own answer while the learner trains."""

    tag: str
    name: str
    """Name of the set."""
    step: int
    """Learner steps done when it began."""
    version: int
    """Policy version that is evaluated."""
    tasks_name: str
    tasks: list[Task]
    again: bool = False
    """True if it is repeated, because too many answers never ran or were not sampled by its version."""


@dataclass
class Evaluations:
    """Evaluates sets of held-out tasks; each result is reported, recorded, and kept with a few samples."""

    config: LearnerConfig
    session: Evaluator
    report: Report
    samples: SampleLog | None = None
    """Keeps some of what the model wrote; None: nobody wants to see it."""
    numbered: bool = True
    """True if the names of tasks have the step in them, because a set is evaluated several times."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """One record for each evaluation of a set, in their order; they are part of the summary and of checkpoints."""
    beside: EvaluatorBeside | None = None
    """Runs evaluations while the learner trains; None: the learner stands meanwhile."""
    under_way: list[PendingEvaluation] = field(default_factory=list)
    """Evaluations that are not over. All of them have one version."""
    _repeat: list[PendingEvaluation] = field(default_factory=list)

    @property
    def first_set(self) -> str:
        """Name of the evaluation set that decides which model is the best."""
        return next(iter(self.config.evaluation_sets), "")

    def evaluate(self, tag: str, name: str, *, step: int, version: int) -> None:
        """Run the held-out tasks of a set, and record what comes of them.

        Args:
            tag: when in the run this is.
            name: name of the set.
            step: learner steps done.
            version: policy version that samples the answers, or a later one.

        Raises:
            NoData: nothing arrived within the deadline.
            Stopped: the run was asked to end, not by its time limit.
        """
        began, tasks = time.monotonic(), self._tasks_name(tag, name, step)
        result, episodes = measure(self.session, tasks, self.config.evaluation_sets[name], version=version)
        self._note(tag, name, step, version, result, episodes, stood_s=time.monotonic() - began)

    def _tasks_name(self, tag: str, name: str, step: int) -> str:
        full = full_name(tag, name)
        return f"{full} {step}" if self.numbered else full

    def _note(
        self,
        tag: str,
        name: str,
        step: int,
        version: int,
        result: EvaluationResult,
        episodes: Sequence[Trajectory | None],
        *,
        stood_s: float,
    ) -> None:
        """Record and report a result. ``stood_s``: seconds for which the learner stood."""
        full = full_name(tag, name)
        record = result.record(tag=tag, step=step, policy_version=version, name=name)
        self.records.append(record | {STOOD: round(stood_s, 3)})
        if self.samples is not None:
            # Before the metrics: whoever reads of the evaluation there finds its samples.
            written = self.samples.evaluation(step, version, full, episodes)
            self.report.write_samples(step, [*written, *self.samples.of_last_step])
        self.report.write(step, result.scalars(name) | {evaluation_tag(name, STOOD): round(stood_s, 3)})
        log.info("evaluation %s: %s", full, result.sentence())

    # --- while the learner trains ---

    def begin(self, tag: str, name: str, *, step: int, version: int, again: bool = False) -> None:
        """Put the tasks of a set, which generators that only evaluate answer with this version.

        A version that is not announced yet is waited for by the requests, and not by the learner.
        """
        assert self.beside is not None
        tasks_name = self._tasks_name(tag, name, step) + (" again" if again else "")
        tasks = self.beside.begin_evaluation(tasks_name, self.config.evaluation_sets[name], version=version)
        self.under_way.append(PendingEvaluation(tag, name, step, version, tasks_name, tasks, again))
        log.info("evaluation %s of version %d begins beside training", full_name(tag, name), version)

    def take_ended(self, *, step: int, version: int, stood_s: float = 0.0) -> list[PendingEvaluation]:
        """Record the evaluations that are over, and return them.

        One of which too many answers never ran, or were sampled by a different version, is repeated once, when no other
        one is under way.

        Args:
            step: learner steps done now, for a repetition.
            version: newest policy version, for a repetition.
            stood_s: seconds for which the learner stood for them.
        """
        assert self.beside is not None
        ended, repeated = list[PendingEvaluation](), list[PendingEvaluation]()
        for one in [one for one in self.under_way if not self.beside.evaluation_out(one.tasks)]:
            self.under_way.remove(one)
            of = self.config.evaluation_sets[one.name]
            episodes = sampled_by(one.version, self.beside.end_evaluation(one.tasks))
            result = result_of(episodes, of)
            if result.missing and not one.again:
                log.warning("evaluation %s is repeated: %s", one.tasks_name, result.sentence())
                repeated.append(one)
                continue
            self._note(one.tag, one.name, one.step, one.version, result, episodes, stood_s=stood_s)
            ended.append(one)
        self._repeat += repeated
        if not self.under_way:
            waiting, self._repeat = self._repeat, []
            for one in waiting:
                self.begin(one.tag, one.name, step=step, version=version, again=True)
        return ended

    @property
    def pending(self) -> list[dict[str, Any]]:
        """Sets and steps of the evaluations that are not over, as records have them."""
        return [{"set": one.name, "step": one.step} for one in [*self.under_way, *self._repeat]]

    def give_up(self) -> None:
        """Forget the evaluations that are not over, because the run ends."""
        assert self.beside is not None
        for one in self.under_way:
            self.beside.end_evaluation(one.tasks)
            log.info("evaluation %s left out, because the run ends", full_name(one.tag, one.name))
        self.under_way, self._repeat = [], []


def run_evaluation(
    config: LearnerConfig,
    *,
    broker: str,
    model: str,
    env_name: str,
    run: str,
    run_dir: Path,
    seed: int,
    keys: Path | None = None,
    weights_url: str = "",
    no_capacity_s: float = 0.0,
) -> None:
    """Evaluate each set once, and write ``run_dir/result.json``. Blocks; SIGTERM ends it.

    The generators serve the model folder as version 0. If the run folder has checkpoints, the weights of the newest
    one are published as version 1 and evaluated in its place.

    Raises:
        LinkDown: no broker answered, or it serves another run.
        CheckpointError: the checkpoint is damaged.
        NoData: nothing arrived within the deadline.
    """
    started = time.monotonic()
    stop = Stop()
    engine: TrainingEngine | None = None
    # Without a checkpoint nothing of the model is needed here.
    if (run_dir / CHECKPOINTS).exists():
        verify_latest(run_dir / CHECKPOINTS)
        gpu = SharedGpu(lock_of_environment(), config.data_timeout_s)
        engine = lead(config, stop, gpu, model=model, seed=seed, segment_tokens=None, run_dir=run_dir)
    (run_dir / PID_FILE).write_text(str(os.getpid()))
    begin = find_start(run_dir, resume=False, lockstep=False)
    progress = _EvaluationProgress()
    link = join(config, broker, run, epoch=begin.epoch, progress=progress, stepped_back=True, keys=keys)
    curriculum = Curriculum(env_name, config, begin.epoch)
    session = BrokerSession(
        link,
        curriculum,
        config,
        lockstep=False,
        stop_reason=stop.reason,
        broker=broker,
        no_capacity_s=no_capacity_s,
    )
    progress.session = session
    register = None if engine is None else engine.register
    publisher = Publisher(run, run_dir, epoch=begin.epoch, keep=2, url=weights_url, register=register)
    evaluate(config, run_dir, engine, session, publisher, started=started)
    if engine is not None:
        engine.close()
        if config.ranks > 1:
            leave()


class _EvaluationProgress:
    """The progress of evaluations for the heartbeat."""

    # Invariant: the link's thread calls this while the main thread evaluates; it only reads.
    session: BrokerSession | None = None

    def __call__(self) -> Progress:
        session = self.session
        if session is None:
            return Progress()
        return Progress(progress=session.intake.deliveries, busy=not session.waiting, gauges=session.gauges())


def evaluate(
    config: LearnerConfig,
    run_dir: Path,
    engine: "TrainingEngine | None",
    session: BrokerSession,
    publisher: Publisher,
    *,
    started: float,
) -> None:
    """Publish the newest checkpoint, evaluate each set, write the result, and close everything but the engine.

    Args:
        engine: loads the checkpoint; None: there is none.
        started: value of ``time.monotonic()`` when this process began.
    """
    report, step, version = Report(run_dir), 0, 0
    then: RunEnd = "resumed"
    try:
        if engine is not None:
            # A process that was started again publishes above what the former one published.
            step = engine.load(run_dir / CHECKPOINTS)["step"]
            version = publisher.published.version + 1
            publisher.publish(version, engine.weights(), announce=session.announce)
            publisher.settle()
        ended_by, evaluations = evaluate_sets(config, session, report, step=step, version=version)
        then = end_of_run(ended_by, session.drained)
        result = {
            "ended_by": ended_by,
            "run": then,
            "steps": step,
            "wall_seconds": time.monotonic() - started,
            "evaluations": evaluations,
        }
        write_whole(run_dir / RESULT, json.dumps(result, indent=1))
    except Exception as error:
        then = end_by_error(error)
        raise
    finally:
        publisher.stop()
        session.close(then)
        report.close()
        publisher.close()


def evaluate_sets(
    config: LearnerConfig, session: Evaluator, report: Report, *, step: int, version: int
) -> tuple[str, list[dict[str, Any]]]:
    """Evaluate each set once. Return what ended it, and the records of the evaluations.

    Raises:
        NoData: nothing arrived within the deadline.
    """
    evaluations = Evaluations(config, session, report, numbered=False)
    for name in config.evaluation_sets:
        try:
            evaluations.evaluate(ONLY, name, step=step, version=version)
        except Stopped as reason:
            log.info("evaluation %s left out: %s", full_name(ONLY, name), reason)
            return str(reason), evaluations.records
    return "all sets evaluated", evaluations.records
