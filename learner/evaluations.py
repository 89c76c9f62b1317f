"""Evaluations: which are due in a run, and the learner role of `offbeat eval`, which evaluates and trains nothing."""

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner.checkpoint_files import verify_latest
from learner.curriculum import Curriculum
from learner.errors import Stopped
from learner.intake.evaluation import measure
from learner.intake.session import BrokerSession
from learner.metrics import Report
from learner.process import SharedGpu, Stop, join, lead, leave
from learner.publisher import Publisher
from learner.run_files import CHECKPOINTS, PID_FILE, RESULT, start
from learner.settings.learner import LearnerConfig
from protocol.files import write_whole
from protocol.processes import lock_of_environment
from protocol.session import Progress

if TYPE_CHECKING:
    from learner.update.engine import TrainingEngine


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

    The last step has none of its own, because the evaluation at the end follows. An evaluation that a crash
    prevented after the checkpoint of its step is made up for.

    Args:
        evaluations: records of the evaluations so far.
        step: learner steps done.

    Example:
        >>> config = LearnerConfig(steps=20, evaluation_every=10)
        >>> seen = [{"set": "", "step": 0}]
        >>> evaluations_due(config, [], 0), evaluations_due(config, seen, 10), evaluations_due(config, seen, 20)
        ([('before', '')], [('step 10', '')], [])
    """
    due = []
    for name, of in config.evaluation_sets.items():
        every = config.evaluation_every if of.every is None else of.every
        # An earlier version wrote no names: it had one set.
        steps = [e["step"] for e in evaluations if e.get("set", "") == name]
        if not steps:
            due.append(("before", name))
        elif is_due(every, step) and step < config.steps and steps[-1] != step:
            due.append((f"step {step}", name))
    return due


log = logging.getLogger(__name__)

TAG = "eval"
"""Tag of these evaluations in the result."""


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
    begin = start(run_dir, resume=False, lockstep=False)
    progress = _EvaluationProgress()
    link = join(config, broker, run, epoch=begin.epoch, progress=progress, stepped_back=True, keys=keys)
    curriculum = Curriculum(env_name, config, begin.epoch)
    exchange = BrokerSession(link, curriculum, config, lockstep=False, stop_reason=stop.reason, broker=broker)
    progress.exchange = exchange
    register = None if engine is None else engine.register
    publisher = Publisher(run, run_dir, epoch=begin.epoch, keep=2, url=weights_url, register=register)
    evaluate(config, run_dir, engine, exchange, publisher, started=started)
    if engine is not None:
        engine.close()
        if config.ranks > 1:
            leave()


class _EvaluationProgress:
    """The progress of evaluations for the heartbeat."""

    # Invariant: the link's thread calls this while the main thread evaluates; it only reads.
    exchange: BrokerSession | None = None

    def __call__(self) -> Progress:
        exchange = self.exchange
        if exchange is None:
            return Progress()
        return Progress(
            progress=exchange.intake.deliveries, busy=not exchange.waiting, gauges=exchange.gauges()
        )


def evaluate(
    config: LearnerConfig,
    run_dir: Path,
    engine: "TrainingEngine | None",
    exchange: BrokerSession,
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
    try:
        if engine is not None:
            # A process that was started again publishes above what the former one published.
            step = engine.load(run_dir / CHECKPOINTS)["step"]
            version = publisher.published.version + 1
            publisher.publish(version, engine.weights(), announce=exchange.announce)
            publisher.settle()
        ended_by, evaluations = evaluate_sets(config, exchange, report, step=step, version=version)
        result = {
            "ended_by": ended_by,
            "steps": step,
            "wall_seconds": time.monotonic() - started,
            "evaluations": evaluations,
        }
        write_whole(run_dir / RESULT, json.dumps(result, indent=1))
    finally:
        publisher.stop()
        exchange.close()
        report.close()
        publisher.close()


def evaluate_sets(
    config: LearnerConfig, exchange: BrokerSession, report: Report, *, step: int, version: int
) -> tuple[str, list[dict[str, Any]]]:
    """Evaluate each set once. Return what ended it, and the records of the evaluations.

    Raises:
        NoData: nothing arrived within the deadline.
    """
    records: list[dict[str, Any]] = []
    for name, of in config.evaluation_sets.items():
        tag = f"{name} {TAG}".strip()
        try:
            result, _ = measure(exchange, tag, of, version=version)
        except Stopped as reason:
            log.info("evaluation %s left out: %s", tag, reason)
            return str(reason), records
        records.append(result.record(tag=TAG, step=step, policy_version=version, name=name))
        report.write(step, result.scalars(name))
        log.info("evaluation %s: %s", tag, result.sentence())
    return "all sets evaluated", records
