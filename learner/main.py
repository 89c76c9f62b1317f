"""Entry point of the learner role: wires its parts and runs the loop. Ranks above 0 follow rank 0."""

import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from learner.checkpoints.checkpoint_files import step_back
from learner.checkpoints.lineage import Start, start
from learner.config import LearnerConfig
from learner.errors import BrokerRefused, ModelUnusable
from learner.families.wiring import waiting_families
from learner.intake.broker_wait import TIME_LIMIT
from learner.intake.curriculum import Curriculum
from learner.intake.exchange import Exchange
from learner.loop import Learner
from learner.metrics import Report
from learner.publishing.publisher import Publisher
from learner.replay.batch import can_rescue
from learner.replay.table import replay_table
from learner.run_files import CHECKPOINTS, PID_FILE, RESULT
from learner.samples.sample_log import SampleLog
from learner.samples.texts import open_tokenizer
from protocol.errors import LinkDown, WeightsError
from protocol.link import ThreadLink
from protocol.messages import DeliveryUnit, Hello
from protocol.session import Progress
from protocol.weights.model_folder import check_names
from protocol.whole_files import write_whole

if TYPE_CHECKING:
    from learner.update.engine import TrainingEngine

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0
DELIVERY_UNITS: dict[str, DeliveryUnit] = {
    "groups": "group",
    "trajectories": "trajectory",
    "windows": "segment",
}


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
) -> None:
    """Train until done, then write ``run_dir/result.json``. Blocks; SIGTERM ends it with a checkpoint.

    Args:
        segment_tokens: most tokens of a segment; see `TrainingEngine`.
        from_step: with ``resume``, go back to the checkpoint of this learner step.
        keys: folder of the keys; None: nothing is encrypted.
        weights_url: URL from which other hosts can fetch versions; empty: only this host can.

    Raises:
        LinkDown: no broker answered, or it serves another run.
        CheckpointError: the checkpoint is damaged, or there is none of ``from_step``.
    """
    stop = Stop()
    engine = lead(config, stop, model=model, seed=seed, segment_tokens=segment_tokens, run_dir=run_dir)
    # A process that wants to end the learner must signal rank 0: torchrun would kill the ranks.
    (run_dir / PID_FILE).write_text(str(os.getpid()))
    lockstep = mode == "sync"
    if resume and from_step is not None:
        step_back(run_dir / CHECKPOINTS, from_step)
    begin = start(run_dir, resume=resume, lockstep=lockstep)
    progress = _Progress()
    link = join(
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
    )
    stop.limit(max_minutes)
    curriculum = Curriculum(env_name, config, begin.epoch, lineage=begin.lineage)
    exchange = Exchange(
        link, curriculum, config, lockstep=lockstep, stop_reason=stop.reason, broker=broker, step=begin.step
    )
    publisher = Publisher(
        run,
        run_dir,
        epoch=begin.epoch,
        keep=config.keep_versions,
        url=weights_url,
        register=engine.register,
    )
    progress.learner = wire(config, run_dir, engine, exchange, publisher, seed=seed)
    train(progress.learner, begin)
    if config.ranks > 1:
        leave()


def lead(
    config: LearnerConfig,
    stop: "Stop",
    *,
    model: str,
    seed: int,
    segment_tokens: int | None,
    run_dir: Path,
) -> "TrainingEngine":
    """Return the engine on rank 0. Other ranks follow rank 0 until the end and do not return.

    Raises:
        ModelUnusable: the engine would publish other tensors than those of the model's folder.
        HostsDiffer: the hosts of the learner have different settings, or do not share the run folder.
    """
    from learner.update.engine import TrainingEngine

    rank = int(os.environ.get("RANK", "0"))
    if rank > 0:
        # Only rank 0 decides when to end.
        stop.ignore()
    if config.nodes > 1:
        meet(config, run_dir, model=model, seed=seed)
    engine = TrainingEngine(
        config, model=model, total_steps=max(1, config.steps), seed=seed, segment_tokens=segment_tokens
    )
    if rank > 0:
        engine.follow()
        leave()
    if Path(model).is_dir():
        try:
            check_names(engine.weights().shapes, Path(model))
        except WeightsError as error:
            raise ModelUnusable(str(error)) from None
    return engine


def meet(config: LearnerConfig, run_dir: Path, *, model: str, seed: int) -> None:
    """Form the group of ranks, and make sure that all hosts agree. This is a collective call.

    Raises:
        HostsDiffer: the hosts of the learner have different settings, or do not share the run folder.
    """
    from learner.gpu import take_gpu
    from learner.update import ranks
    from learner.update.deepspeed_zero import join_ranks

    take_gpu(config)
    join_ranks(config)
    ranks.check_hosts(config, run_dir, model=Path(model), seed=seed)


def wire(
    config: LearnerConfig,
    run_dir: Path,
    engine: "TrainingEngine",
    exchange: Exchange,
    publisher: Publisher,
    *,
    seed: int,
) -> Learner:
    """Assemble a learner from its parts."""
    replay = replay_table(config)
    if replay is not None:
        exchange.intake.rescuable = partial(can_rescue, replay)
    exchange.intake.families = waiting_families(config, exchange.curriculum, engine.model, seed=seed)
    samples = SampleLog(run_dir, open_tokenizer(engine.model), seed=seed)
    return Learner(
        config,
        run_dir,
        engine,
        exchange,
        publisher,
        Report(run_dir),
        replay=replay,
        samples=samples,
        seed=seed,
    )


def train(learner: Learner, begin: Start) -> None:
    """Train from the starting point to the end, write the model and the result, and close everything."""
    try:
        learner.start_from(begin)
        learner.train(continues=begin.continues)
        with learner.writes.writing(learner.written_bytes):
            learner.engine.save_pretrained(learner.run_dir / "model")
        write_result(learner)
    finally:
        # The announcement that is under way needs the exchange.
        learner.publisher.stop()
        learner.exchange.close()
        learner.report.close()
        learner.publisher.close()
    learner.engine.close()


def write_result(learner: Learner) -> None:
    """Write ``result.json``, the learner's part of the summary; docs/run/summary.md explains the fields."""
    totals, intake = learner.totals, learner.exchange.intake
    lags = {int(lag): count for lag, count in totals.lag_counts.items()}
    tokens = sum(lags.values())
    result: dict[str, Any] = {
        "ended_by": learner.ended_by,
        "steps": learner.step,
        "policy_version": learner.version,
        "wall_seconds": learner.wall_seconds,
        "parameters": learner.engine.parameters._asdict(),
        "evaluations": learner.evaluations,
        "tokens_trained": totals.trained_tokens,
        "tokens_replayed": totals.replayed_tokens,
        "tokens_generated": learner.tokens_generated,
        "trajectories_trained": totals.trained_trajectories,
        "trajectories_by_outcome": intake.counts.trajectories,
        "tokens_by_outcome": intake.counts.tokens,
        "episodes": intake.signal.state(),
        "policy_lag": {
            "mean_versions": sum(lag * n for lag, n in lags.items()) / max(1, tokens),
            "max_versions": max(lags, default=0),
            "tokens_by_lag": {str(lag): lags[lag] for lag in sorted(lags)},
        },
        "skipped_steps": totals.skipped_steps,
        "step_seconds": totals.step_seconds,
        "wait_seconds": totals.wait_seconds,
        "update_seconds": totals.update_seconds,
        "publish_seconds": totals.publish_seconds,
    }
    write_whole(learner.run_dir / RESULT, json.dumps(result, indent=1))


def leave() -> NoReturn:
    """End this process at once: after the use of a process group, torch's threads can abort an orderly
    exit."""
    logging.shutdown()
    os._exit(0)


class Stop:
    """The reason why training should end, if there is one: a signal or the time limit."""

    def __init__(self) -> None:
        self._deadline, self._signalled = float("inf"), False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signal)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def ignore(self) -> None:
        """Ignore the signals and leave the decision to rank 0."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def limit(self, minutes: float) -> None:
        """Start the clock of the time limit."""
        self._deadline = time.monotonic() + minutes * 60

    def reason(self) -> str:
        """Return why training should end, or ""."""
        if self._signalled:
            return "SIGTERM"
        return TIME_LIMIT if time.monotonic() > self._deadline else ""


class _Progress:
    """The learner's progress for its heartbeat."""

    # Invariant: the link's thread calls this while the main thread trains; it only reads.
    learner: Learner | None = None

    def __call__(self) -> Progress:
        if self.learner is None:
            return Progress()
        exchange, writes = self.learner.exchange, self.learner.writes
        return Progress(
            # Invariant: the patience is read first. Where a write has just ended, its end is then counted below.
            patience_s=writes.patience_s,
            progress=self.learner.step + exchange.intake.deliveries + writes.writes,
            busy=not exchange.waiting,
            policy_version=self.learner.publisher.announced,
            gauges=exchange.gauges(),
        )


def join(
    config: LearnerConfig,
    broker: str,
    run: str,
    *,
    epoch: int,
    progress: Callable[[], Progress],
    lineage: int | None = None,
    step: int = 0,
    stepped_back: bool = False,
    keys: Path | None = None,
) -> ThreadLink:
    """Connect to the broker as this epoch's learner.

    Args:
        progress: called from the link's thread for each heartbeat.
        lineage: epoch that began the line of checkpoints; None: this one.
        step: learner steps that the checkpoint covers.
        stepped_back: whether the run went back to an earlier checkpoint on purpose.
        keys: folder of the keys; None: nothing is encrypted.

    Raises:
        LinkDown: no broker answered, or it serves another run.
    """
    hello = Hello(
        role="learner",
        peer="learner",
        incarnation=epoch,
        pid=os.getpid(),
        host=socket.gethostname(),
        epoch=epoch,
        lineage=epoch if lineage is None else lineage,
        step=step,
        step_back=stepped_back,
        deliver=DELIVERY_UNITS[config.train_on],
    )
    link = ThreadLink(broker, hello, progress=progress, keys=keys)
    await_broker(link, broker)
    welcome = link.session.welcome
    if welcome is not None and welcome.run != run:
        raise LinkDown(f"the broker at {broker} serves run {welcome.run!r}, this learner belongs to {run!r}")
    return link


def await_broker(link: ThreadLink, broker: str) -> None:
    """Wait until the broker has answered.

    Raises:
        LinkDown: the broker did not answer within `JOIN_TIMEOUT_S`.
        BrokerRefused: the broker will never let this process join.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while not link.session.joined:
        # A person may list the key while the learner waits, so a wrong key is not the end.
        if link.refused is not None and link.refused.code != "wrong_key":
            raise BrokerRefused(
                f"the broker refused the learner ({link.refused.code}): {link.refused.message}"
            )
        if time.monotonic() > deadline:
            raise LinkDown(
                link.trouble
                or f"no broker took the learner on at {broker} within {JOIN_TIMEOUT_S:g} s; is it started, and is "
                "broker.endpoint the same for both?"
            )
        time.sleep(0.05)
