"""Start and end that every process of the learner role shares, whether it trains or evaluates.

It starts the engine (ranks above 0 follow rank 0), connects to the broker, has a GPU alone while generators sleep, and
knows why it should end.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from learner.errors import BrokerRefused, GpuKept, ModelUnusable
from learner.intake.session import TIME_LIMIT
from learner.settings.learner import LearnerConfig
from protocol.errors import LinkDown, WeightsError
from protocol.messages.fields import DeliveryUnit, RunEnd
from protocol.messages.peers import Hello
from protocol.processes import GpuLock
from protocol.session import Progress
from protocol.sockets import BlockingLink, ThreadLink
from protocol.weights.format import check_names

if TYPE_CHECKING:
    from learner.update.engine import TrainingEngine


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
            return SIGNALLED
        return TIME_LIMIT if time.monotonic() > self._deadline else ""


SIGNALLED = "SIGTERM"
"""Why a run ended that a signal has ended."""


def end_of_run(ended_by: str, drained: str) -> RunEnd:
    """Return what becomes of a run whose learner ends without an error.

    Args:
        ended_by: why it ends.
        drained: why the broker wanted it to end; "" if it did not.

    Example:
        >>> end_of_run("time limit", ""), end_of_run(SIGNALLED, ""), end_of_run("it ends", "it ends")
        ('over', 'resumed', 'resumed')
    """
    return "resumed" if ended_by == SIGNALLED or drained else "over"


def end_by_error(error: BaseException) -> RunEnd:
    """Return what becomes of a run whose learner ends by an error: it is over if another start would only repeat it.

    A learner that the broker refuses says nothing about the run: a newer one may have its place.

    Example:
        >>> from learner.errors import NoData
        >>> end_by_error(NoData("nothing arrived")), end_by_error(OSError("no room"))
        ('over', 'resumed')
    """
    final = getattr(error, "final", False) and not isinstance(error, BrokerRefused)
    return "over" if final else "resumed"


def leave() -> NoReturn:
    """End this process at once: after the use of a process group, torch's threads can abort an orderly
    exit."""
    logging.shutdown()
    os._exit(0)


class SharedGpu:
    """The learner's side of `protocol.processes`: generators sleep while it has the GPUs alone.

    Args:
        lock: None: nobody sleeps.
        timeout_s: longest wait for the generators.
    """

    def __init__(self, lock: GpuLock | None, timeout_s: float) -> None:
        self._lock, self._timeout_s = lock, timeout_s
        self.waited_s: float | None = None
        """Seconds that the learner waited last; None if nobody sleeps."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the GPUs alone while the context lasts, once all generators sleep.

        Raises:
            GpuKept: a generator did not fall asleep in time.
        """
        if self._lock is None:
            yield
            return
        try:
            self.waited_s = self._lock.wait_alone(self._timeout_s)
        except TimeoutError:
            raise GpuKept(
                f"a generator has kept the GPU that it shares with the learner for {self._timeout_s:g} s (from "
                "learner.data_timeout_s); generator logs say what it does; set generator.sleep_in_updates to false if "
                "this happens again"
            ) from None
        try:
            yield
        finally:
            self._lock.release()


def lead(
    config: LearnerConfig,
    stop: Stop,
    gpu: "SharedGpu",
    *,
    model: str,
    seed: int,
    segment_tokens: int | None,
    run_dir: Path,
) -> "TrainingEngine":
    """Return the engine on rank 0. Other ranks follow rank 0 until the end and do not return.

    Args:
        gpu: GPUs of all ranks, which the learner has alone while it loads the model.

    Raises:
        GpuKept: a generator did not fall asleep in time.
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
    # Invariant: the other ranks load nothing before rank 0 joins them, which has the GPUs alone by then.
    with gpu.alone() if rank == 0 else nullcontext():
        engine = TrainingEngine(
            config, model=model, total_steps=max(1, config.steps), seed=seed, segment_tokens=segment_tokens
        )
    if rank > 0:
        engine.follow()
        leave()
    if Path(model).is_dir():
        try:
            check_names(engine.shapes, Path(model))
        except WeightsError as error:
            raise ModelUnusable(str(error)) from None
    return engine


def meet(config: LearnerConfig, run_dir: Path, *, model: str, seed: int) -> None:
    """Form the group of ranks, and make sure that all hosts agree. This is a collective call.

    Raises:
        HostsDiffer: the hosts of the learner have different settings, or do not share the run folder.
    """
    from learner.update import ranks
    from learner.update.devices import take_gpu

    take_gpu(config)
    ranks.join_ranks(config)
    ranks.check_hosts(config, run_dir, model=Path(model), seed=seed)


JOIN_TIMEOUT_S = 60.0
DELIVERY_UNITS: dict[str, DeliveryUnit] = {
    "groups": "group",
    "trajectories": "trajectory",
    "windows": "segment",
}


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
    connect: Callable[..., BlockingLink] = ThreadLink,
) -> BlockingLink:
    """Connect to the broker as this epoch's learner.

    Args:
        progress: called from the link's thread for each heartbeat.
        lineage: epoch that began the line of checkpoints; None: this one.
        step: learner steps that the checkpoint covers.
        stepped_back: whether the run went back to an earlier checkpoint on purpose.
        keys: folder of the keys; None: nothing is encrypted.
        connect: makes the connection.

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
    link = connect(broker, hello, progress=progress, keys=keys)
    await_broker(link, broker)
    welcome = link.session.welcome
    if welcome is not None and welcome.run != run:
        raise LinkDown(f"the broker at {broker} serves run {welcome.run!r}, this learner belongs to {run!r}")
    return link


def await_broker(link: BlockingLink, broker: str) -> None:
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
        link.wait(0.05)
