"""The learner's exchange with the broker: sends tasks, commits and announcements, and receives units."""

import logging
import time
from collections.abc import Callable, Sequence

from learner.config import LearnerConfig
from learner.errors import NoData, Stopped
from learner.intake.broker_connection import BrokerConnection
from learner.intake.broker_wait import POLL_S, BrokerWait
from learner.intake.commit_sender import CommitSender
from learner.intake.curriculum import Curriculum
from learner.intake.intake import Intake
from learner.settings.evaluation import EvaluationConfig
from learner.trajectory import Trajectory
from learner.units import Unit
from protocol.messages.episodes import Task
from protocol.messages.peers import PublishWeights
from protocol.sockets import ThreadLink

log = logging.getLogger(__name__)

HELD_TIMEOUT_S = 180.0
"""Longest wait for Held messages; longer than a restart of the broker takes."""
CONFIRM_TIMEOUT_S = 15.0


class Exchange:
    """Blocking calls over a `ThreadLink`; every wait has a deadline, and its error says what is missing."""

    def __init__(
        self,
        link: ThreadLink,
        curriculum: Curriculum,
        config: LearnerConfig,
        *,
        lockstep: bool,
        stop_reason: Callable[[], str],
        broker: str = "",
        step: int = 0,
    ) -> None:
        self._link, self._config, self.lockstep = link, config, lockstep
        self._broker = f"the broker at {broker}" if broker else "the broker"
        self.curriculum = curriculum
        self.intake = Intake(curriculum, config.drops_uniform_groups, windows=config.train_on == "windows")
        self._commits = CommitSender(link, self.intake, config, step=step)
        self._connection = BrokerConnection(link, self.intake, self._commits, self._broker)
        self._wait = BrokerWait(
            self._connection, link, self.intake, config, stop_reason=stop_reason, broker=self._broker
        )
        self.while_waiting: Callable[[], None] = lambda: None
        """Function that is called while waiting, after each look at the inbox."""

    def collect(self, *, step: int, version: int) -> list[Unit]:
        """Wait for a full batch and return it, oldest units first; keep the task queue filled meanwhile.

        In lockstep it waits for all tasks under way, the batches of a forced lag included, so that no token
        is sampled while the weights change. Units are then taken in the order in which their tasks were dealt
        out.

        Raises:
            NoData: nothing arrived for `data_timeout_s`, or at the start for `start_timeout_s`.
            NothingToLearn: everything that arrives fails, or has equal returns.
            Stopped: the run was asked to end, or has nothing left to learn.
        """
        config = self._config
        wanted = config.units_per_batch
        batches = min(config.forced_lag + 1, config.steps - step) if self.lockstep else 1
        oldest = version - (config.forced_lag if self.lockstep else config.max_policy_lag)

        def enough() -> bool:
            self.while_waiting()
            self.intake.drop_stale(oldest)
            self.intake.close_overdue(time.monotonic())
            self.refill(step=step, version=version)
            return len(self.intake.ready) >= wanted * batches

        def missing() -> str:
            return f"{len(self.intake.ready)} of {wanted * batches} {config.train_on} are here"

        self._wait.until(enough, missing, limited=True, wanted=wanted * batches)
        return self.intake.take(wanted, in_order=self.lockstep)

    def evaluate(self, tag: str, of: EvaluationConfig, *, version: int) -> list[Trajectory | None]:
        """Run the episodes of an evaluation set, sampled by ``version`` or a later one.

        The run's time limit does not end an evaluation.

        Returns:
            One trajectory for each answer, in the order of the tasks; None for one that was given up.

        Raises:
            NoData: nothing arrived within the deadline.
            Stopped: the run was asked to end, not by its time limit.
        """
        self._connection.evaluating = tasks = self.curriculum.evaluation(tag, version, of)
        self.put(tasks)

        def out() -> int:
            return sum(task.group_id not in self.intake.evaluated for task in tasks)

        def missing() -> str:
            return f"evaluation {tag!r}: {out()} of {len(tasks)} tasks are out"

        def done() -> bool:
            self.while_waiting()
            return not out()

        try:
            self._wait.until(done, missing, limited=False)
        finally:
            self._connection.evaluating = []
        return [self.intake.evaluated.pop(task.group_id) for task in tasks]

    def inherit(self) -> None:
        """Wait for the broker's list of held tasks of the continued lineage, and adopt them.

        Raises:
            NoData: the list did not come within `HELD_TIMEOUT_S`.
            Stopped: the run was asked to end.
        """
        self._connection.awaiting_held, deadline = True, time.monotonic() + HELD_TIMEOUT_S
        while self._connection.awaiting_held:
            if reason := self._wait.end_reason():
                raise Stopped(reason)
            if time.monotonic() > deadline:
                raise NoData(
                    f"{self._broker} has not said within {HELD_TIMEOUT_S:g} s what it holds of lineage "
                    f"{self.curriculum.lineage}; look at its log and its /status, then start the learner again "
                    "with --resume"
                )
            self._connection.pump(POLL_S)

    def refill(self, *, step: int, version: int) -> None:
        """Commit dropped units, and put tasks up to the capacity that the lag bound allows."""
        self.flush(step=step)
        left = max(1, self._config.steps - step)
        tasks = self.curriculum.refill(
            version=version,
            lockstep=self.lockstep,
            steps_left=left,
            backlog=0 if self.lockstep else self.intake.backlog,
        )
        self.put(tasks)

    def flush(self, *, step: int) -> None:
        """Commit units that were dropped, and repeat commits that were lost: see `CommitSender.flush`."""
        self._commits.flush(step=step)

    def commit(
        self, trained: Sequence[Unit], *, step: int, version: int = -1, replayed_tokens: int = 0
    ) -> None:
        """Commit units that entered a gradient, and units that were dropped: see `CommitSender.commit`."""
        self._commits.commit(trained, step=step, version=version, replayed_tokens=replayed_tokens)

    def checkpointed(self, *, step: int) -> None:
        """Tell the broker that a checkpoint covers ``step``; repeated at every join."""
        self._commits.checkpointed(step=step)

    def announce(self, message: PublishWeights) -> None:
        """Announce a new version to the broker; repeated at every join. Any thread may call this."""
        self._connection.announce(message)

    def confirm_commits(self, *, step: int) -> None:
        """Make sure, before leaving, that the broker has received all commits.

        A commit may be lost with its connection, without an error. So the learner joins again, which makes
        the broker list the units that it holds, and repeats the commits of those units, until none is left.
        If the broker does not answer within `CONFIRM_TIMEOUT_S`, a learner that continues this lineage
        repeats them.
        """
        connection, deadline = self._connection, time.monotonic() + CONFIRM_TIMEOUT_S
        connection.confirming = True
        self.flush(step=step)
        while connection.confirming:
            connection.awaiting_held = True
            self._link.rejoin()
            while connection.awaiting_held:
                if time.monotonic() > deadline:
                    log.warning(
                        "%s has not confirmed within %g s what was committed last; a learner that resumes this run "
                        "will tell it again",
                        self._broker,
                        CONFIRM_TIMEOUT_S,
                    )
                    return
                connection.pump(POLL_S)

    def close(self) -> None:
        """Tell the broker that the learner is done, and close the connection."""
        self._link.close("done")

    @property
    def in_step(self) -> bool:
        """Whether trajectories wait at the end of each window for the next version."""
        return self.lockstep and self.intake.windows

    @property
    def awaits_versions(self) -> bool:
        """Whether a version must be announced before tasks are put: in lockstep, and without any room for lag."""
        return self.lockstep or self._config.max_policy_lag == 0

    @property
    def version_before(self) -> int:
        """Newest policy version that the broker knew at the last join."""
        return self._link.session.policy_version

    def put(self, tasks: Sequence[Task]) -> None:
        """Send tasks to the broker, which ignores those that it has seen.

        Raises:
            BrokerRefused: the broker is of an earlier version, and would lose a part of a task.
        """
        self._connection.put(tasks)

    @property
    def checkpoint_wanted(self) -> str:
        """Reason why the broker wants a checkpoint, or ""; who writes one sets it to ""."""
        return self._connection.checkpoint_wanted

    @checkpoint_wanted.setter
    def checkpoint_wanted(self, reason: str) -> None:
        self._connection.checkpoint_wanted = reason

    @property
    def waiting(self) -> bool:
        """Whether `collect` or `evaluate` waits for the broker. Any thread may ask."""
        return self._wait.waiting

    def gauges(self) -> tuple[tuple[str, float], ...]:
        """Return what the learner waits for, and since how many seconds, for its heartbeat."""
        return self._wait.gauges()
