"""Entry point of the learner role: wires its parts and runs the loop. Ranks above 0 follow rank 0."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner.annotations import AnnotationLog
from learner.checkpoint_files import step_back
from learner.curriculum import Curriculum
from learner.given import Conversation, TaughtAnswers, given_conversations, taught_answers
from learner.intake.session import BrokerSession
from learner.intake.waiting_families import waiting_families
from learner.metrics import Report
from learner.process import SharedGpu, Stop, end_by_error, end_of_run, join, lead, leave
from learner.publisher import Publisher
from learner.replay.batch import can_rescue
from learner.replay.table import replay_table
from learner.run import TrainingRun
from learner.run_files import CHECKPOINTS, PID_FILE, RESULT, Start, find_start
from learner.sample_log import SampleLog, open_tokenizer
from learner.settings.learner import LearnerConfig
from learner.settings.trackers import TrackerName
from learner.trackers.opening import open_trackers
from learner.trackers.sink import TrackedRun
from learner.trainer import Trainer
from learner.update.report import FloatType, limit_of
from protocol.files import write_whole
from protocol.messages.fields import RunEnd
from protocol.processes import lock_of_environment
from protocol.session import Progress
from protocol.sockets import BlockingLink, ThreadLink

if TYPE_CHECKING:
    from learner.update.engine import TrainingEngine


def run_learner(
    config: LearnerConfig,
    *,
    broker: str,
    model: str,
    env_name: str,
    run: str,
    run_dir: Path,
    seed: int,
    mode: str,
    max_minutes: float,
    resume: bool,
    segment_tokens: int | None = None,
    from_step: int | None = None,
    keys: Path | None = None,
    weights_url: str = "",
    no_capacity_s: float = 0.0,
    generator_dtype: FloatType = "float32",
    trackers: Sequence[TrackerName] = ("tensorboard",),
    tracked: TrackedRun | None = None,
    evaluates_beside: bool = False,
    given: Callable[[], Sequence[Conversation]] = tuple,
    describe: Callable[[Path, str, Mapping[str, Any]], None] | None = None,
    connect: Callable[..., BlockingLink] = ThreadLink,
) -> None:
    """Train until done, then write ``run_dir/result.json``. Blocks; SIGTERM ends it with a checkpoint.

    Args:
        segment_tokens: most tokens of a segment; see `TrainingEngine`.
        from_step: with ``resume``, go back to the checkpoint of this learner step.
        keys: folder of the keys; None: nothing is encrypted.
        weights_url: URL from which other hosts can fetch versions; empty: only this host can.
        no_capacity_s: longest wait while no generator serves or no actor is there, in seconds.
        generator_dtype: float type in which generators compute, for the comparison of their log-probabilities.
        trackers: names of the trackers that get the report, see `learner.trackers`.
        evaluates_beside: whether generators that only evaluate answer evaluation tasks while training goes on.
        given: reads the conversations of ``config.conversations``.
        describe: writes the card of an exported model, see `TrainingRun.describe`.
        tracked: how they show the run; None: by the name of its folder, without settings.
        connect: makes the connection to the broker.

    Raises:
        LinkDown: no broker answered, or it serves another run.
        CheckpointError: the checkpoint is damaged, or there is none of ``from_step``.
    """
    stop, lockstep = Stop(), mode == "sync"
    gpu = SharedGpu(lock_of_environment(), config.data_timeout_s)
    engine = lead(config, stop, gpu, model=model, seed=seed, segment_tokens=segment_tokens, run_dir=run_dir)
    # A process that wants to end the learner must signal rank 0: torchrun would kill the ranks.
    (run_dir / PID_FILE).write_text(str(os.getpid()))
    if resume and from_step is not None:
        step_back(run_dir / CHECKPOINTS, from_step)
    begin = find_start(run_dir, resume=resume, lockstep=lockstep)
    progress = _Progress()
    link = _join_from(begin, config, broker, run, progress=progress, keys=keys, connect=connect)
    stop.limit(max_minutes)
    curriculum = Curriculum(env_name, config, begin.epoch, lineage=begin.lineage, seed=seed)
    session = BrokerSession(
        link,
        curriculum,
        config,
        lockstep=lockstep,
        stop_reason=stop.reason,
        broker=broker,
        step=begin.step,
        no_capacity_s=no_capacity_s,
    )
    publisher = Publisher(
        run, run_dir, epoch=begin.epoch, keep=config.keep_versions, url=weights_url, register=engine.register
    )
    report = Report(run_dir, sinks=open_trackers(trackers, tracked or TrackedRun(run, run_dir)))
    training = wire(config, run_dir, engine, session, publisher, gpu, report, seed=seed, given=given)
    sampled = "bfloat16" if config.publish_dtype == "bfloat16" else generator_dtype
    training.evaluations.beside = session if evaluates_beside else None
    training.trainer.given = given_conversations(config, given, seed=seed)
    if (taught := taught_answers(config, given)) is not None:
        training.trainer.taught = taught
        if isinstance(taught, TaughtAnswers):
            session.intake.rescuable = taught.can_teach
    training.trainer.sampler_limit = limit_of(config.sampler_gap, config.dtype_used, sampled)
    training.describe = describe
    progress.run = training
    train(training, publisher, begin)
    # A tracker that hangs would hold the process at its end, too. With all roles in one process, a person goes on.
    if config.ranks > 1 or (report.abandoned and connect is ThreadLink):
        leave()


def _join_from(
    begin: Start,
    config: LearnerConfig,
    broker: str,
    run: str,
    *,
    progress: "_Progress",
    keys: Path | None,
    connect: Callable[..., BlockingLink],
) -> BlockingLink:
    """Join the broker with the starting point of this process."""
    return join(
        config,
        broker,
        run,
        epoch=begin.epoch,
        lineage=begin.lineage,
        step=begin.step,
        # Without checkpoints each restart begins anew, as the configuration asks for.
        stepped_back=begin.stepped_back or not config.checkpoint_every,
        progress=progress,
        keys=keys,
        connect=connect,
    )


def wire(
    config: LearnerConfig,
    run_dir: Path,
    engine: "TrainingEngine",
    session: BrokerSession,
    publisher: Publisher,
    gpu: SharedGpu,
    report: Report,
    *,
    seed: int,
    given: Callable[[], Sequence[Conversation]] = tuple,
) -> TrainingRun:
    """Assemble a run from its parts."""
    replay = replay_table(config)
    if replay is not None:
        session.intake.rescuable = partial(can_rescue, replay)
    session.intake.route_layers = engine.route_layers
    session.intake.families = waiting_families(
        config, session.curriculum, engine.model, seed=seed, given=given
    )
    samples = SampleLog(run_dir, open_tokenizer(engine.model), seed=seed)
    trainer = Trainer(
        config,
        run_dir,
        engine,
        session,
        publisher,
        report,
        replay=replay,
        samples=samples,
        annotations=annotation_log(config, run_dir),
        seed=seed,
        gpu=gpu,
    )
    return TrainingRun(trainer, session)


def annotation_log(config: LearnerConfig, run_dir: Path) -> AnnotationLog | None:
    """Return what writes the annotations; None if nobody wants them."""
    if not config.annotations_mib:
        return None
    return AnnotationLog(run_dir, mib=config.annotations_mib, floats=config.annotations_float)


def train(run: TrainingRun, publisher: Publisher, begin: Start) -> None:
    """Train from the starting point to the end, write the model and the result, and close everything."""
    then: RunEnd = "resumed"
    failed = True
    try:
        run.start_from(begin)
        run.train(continues=begin.continues)
        run.checkpoints.write_last_model()
        then = end_of_run(run.ended_by, run.session.drained)
        write_result(run, then)
        failed = False
    except Exception as error:
        then = end_by_error(error)
        raise
    finally:
        # The announcement that is under way needs the session.
        publisher.stop()
        run.session.close(then)
        run.trainer.report.close(failed=failed)
        if run.trainer.annotations is not None:
            run.trainer.annotations.close()
        publisher.close()
    run.trainer.engine.close()


def write_result(run: TrainingRun, then: RunEnd) -> None:
    """Write ``result.json``, the learner's part of the summary; docs/run/summary.md explains the fields."""
    trainer, totals, intake = run.trainer, run.trainer.totals, run.session.intake
    result: dict[str, Any] = {
        **run.facts(),
        "run": then,
        "wall_seconds": run.checkpoints.wall_seconds,
        "parameters": trainer.engine.parameters._asdict(),
        "tokens_replayed": totals.replayed_tokens,
        "tokens_given": totals.given_tokens,
        "trajectories_trained": totals.trained_trajectories,
        "trajectories_by_outcome": intake.counts.trajectories,
        "tokens_by_outcome": intake.counts.tokens,
        "episodes": intake.signal.state(),
        "skipped_steps": totals.skipped_steps,
        "step_seconds": totals.step_seconds,
        "wait_seconds": totals.wait_seconds,
        "update_seconds": totals.update_seconds,
        "publish_seconds": totals.publish_seconds,
    }
    write_whole(trainer.run_dir / RESULT, json.dumps(result, indent=1))
    trainer.report.write_summary(trainer.step, result)


class _Progress:
    """The learner's progress for its heartbeat."""

    # Invariant: the link's thread calls this while the main thread trains; it only reads.
    run: TrainingRun | None = None

    def __call__(self) -> Progress:
        if self.run is None:
            return Progress()
        trainer, session, writes = self.run.trainer, self.run.session, self.run.checkpoints.writes
        return Progress(
            # Invariant: the patience is read first. Where a write has just ended, its end is then counted below.
            patience_s=writes.patience_s,
            progress=trainer.step + session.intake.deliveries + writes.writes,
            busy=not session.waiting,
            policy_version=trainer.publisher.announced,
            gauges=(*session.gauges(), *trainer.pace, *trainer.report.newest.gauges),
        )
