"""The learner's conversation with the broker: tasks out, groups in, commits and announcements out."""

import queue
import time
from collections.abc import Callable, Sequence

from learner.config import LearnerConfig
from learner.curriculum import Curriculum
from learner.inlet import Group, Inlet
from learner.trajectory import Trajectory
from protocol.link import ThreadLink
from protocol.messages import DeliveryCredit, Drain, PublishWeights, PutTasks, Refused, Task

CREDIT_UNITS = 64
TASKS_PER_MESSAGE = 512
POLL_S = 0.2


class NoData(RuntimeError):
    """Nothing to train on arrived within the deadline."""


class BrokerRefused(RuntimeError):
    """The broker refused something the run cannot go on without."""


class Stopped(Exception):
    """The run was asked to end; the text says by what (SIGTERM, time limit, drain)."""


class Exchange:
    """Blocking calls over a `ThreadLink`; every wait has a deadline and names whom it waits for."""

    def __init__(
        self,
        link: ThreadLink,
        curriculum: Curriculum,
        config: LearnerConfig,
        *,
        lockstep: bool,
        stop_reason: Callable[[], str],
    ) -> None:
        self._link, self._config, self._lockstep, self._stop_reason = link, config, lockstep, stop_reason
        self.curriculum = curriculum
        self.inlet = Inlet(curriculum, config.filter_uniform_groups)
        self._drained = ""
        self._evaluating: list[Task] = []
        self._announced: PublishWeights | None = None
        self.waiting = False
        """Whether `collect` or `evaluate` is waiting for the broker now."""

    def collect(self, *, step: int, version: int) -> list[Group]:
        """Wait for a full batch of whole groups, oldest first; keeps the task queue filled meanwhile.

        Raises:
            NoData: nothing arrived for `data_timeout_s`.
            Stopped: the run is to end.
        """
        wanted = self._config.batch_trajectories
        self.refill(step=step, version=version)

        def enough() -> bool:
            self.refill(step=step, version=version)
            return self.inlet.waiting >= wanted

        self._wait(
            enough, lambda: f"{self.inlet.waiting} of {wanted} trajectories of the next batch are here"
        )
        return self.inlet.take(wanted)

    def evaluate(self, tag: str, *, version: int) -> list[Trajectory | None]:
        """Greedy episodes on held-out tasks, sampled by ``version`` or a later one; None where one was given up."""
        self._evaluating = tasks = self.curriculum.evaluation(tag, version)
        self._put(tasks)

        def missing() -> list[Task]:
            return [task for task in tasks if task.group_id not in self.inlet.evaluated]

        self._wait(
            lambda: not missing(),
            lambda: f"evaluation {tag!r}: {len(missing())} of {len(tasks)} tasks are out",
        )
        self._evaluating = []
        return [self.inlet.evaluated.pop(task.group_id) for task in tasks]

    def refill(self, *, step: int, version: int) -> None:
        """Let go of what was filtered out and put tasks up to the capacity that the lag bound allows."""
        self.commit([], step=step)
        self._put(self.curriculum.refill(version=version, lockstep=self._lockstep))

    def put_again(self, tasks: Sequence[Task]) -> None:
        """Tasks that a checkpoint says were under way."""
        self._put(tasks)

    def commit(self, trained: Sequence[Group], *, step: int) -> None:
        """These groups entered a gradient at ``step``."""
        message = self.inlet.commit(self.curriculum.epoch, step, trained)
        if message is not None:
            self._link.send(message)

    def announce(self, message: PublishWeights) -> None:
        """Tell the broker of a new version; told again whenever we join again."""
        self._announced = message
        self._link.send(message)

    def _put(self, tasks: Sequence[Task]) -> None:
        for start in range(0, len(tasks), TASKS_PER_MESSAGE):
            self._link.send(PutTasks(tasks=list(tasks[start : start + TASKS_PER_MESSAGE])))

    def _joined(self) -> None:
        """A broker knows nothing of us after a join, if it was restarted: say again what it needs to know.

        It ignores tasks that it has seen.
        """
        if self._announced is not None:
            self._link.send(self._announced)
        groups = self.curriculum.outstanding.items()
        self._put([task for group, tasks in groups if not self.inlet.holds(group) for task in tasks])
        self._put([task for task in self._evaluating if task.group_id not in self.inlet.evaluated])
        self._link.send(DeliveryCredit(units=CREDIT_UNITS))

    def _wait(self, done: Callable[[], bool], whom: Callable[[], str]) -> None:
        self.waiting = True
        try:
            self._wait_until(done, whom)
        finally:
            self.waiting = False

    def _wait_until(self, done: Callable[[], bool], whom: Callable[[], str]) -> None:
        self._pump(0.0)
        patience = time.monotonic() + self._config.data_timeout_s
        while True:
            if reason := self._drained or self._stop_reason():
                raise Stopped(reason)
            if done():
                return
            if self._pump(POLL_S):
                patience = time.monotonic() + self._config.data_timeout_s
            elif time.monotonic() > patience:
                raise NoData(
                    f"nothing arrived for {self._config.data_timeout_s:g} s: {whom()}; broker gauges "
                    f"{self.inlet.gauges}; the broker's /status says who waits for whom"
                )

    def _pump(self, timeout_s: float) -> bool:
        """Take in all that has arrived, waiting for the first message; True if a delivery was among it."""
        before = self.inlet.deliveries
        try:
            item = self._link.inbox.get(timeout=timeout_s) if timeout_s else self._link.inbox.get_nowait()
            while True:
                if item is None:
                    self._joined()
                else:
                    self._take_in(*item)
                item = self._link.inbox.get_nowait()
        except queue.Empty:
            return self.inlet.deliveries > before

    def _take_in(self, message: object, rest: list[bytes]) -> None:
        if isinstance(message, Drain):
            self._drained = message.reason or "drain"
            return
        if isinstance(message, Refused) and message.code != "unknown_peer":
            raise BrokerRefused(f"the broker refused the learner ({message.code}): {message.message}")
        before = self.inlet.deliveries
        self.inlet.received(message, rest)  # type: ignore[arg-type]
        if self.inlet.deliveries > before:
            self._link.send(DeliveryCredit(units=1))
