"""The learner's conversation with the broker: sends tasks, commits and announcements, and receives units.

Every wait has a deadline, and its error says what is missing. What the broker may have lost is repeated at each join.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from learner.curriculum import Curriculum
from learner.errors import BrokerRefused, NoData, Stopped
from learner.intake.intake import Intake, receive
from learner.settings.learner import EvaluationConfig, LearnerConfig
from learner.trajectory import Trajectory, Unit
from protocol.codec import MAJOR, MAX_HEADER_BYTES, AnyMessage
from protocol.messages.episodes import (
    Checkpointed,
    CheckpointWanted,
    Commit,
    Deliver,
    DeliveryCredit,
    Held,
    PutTasks,
    Task,
)
from protocol.messages.peers import Drain, PublishWeights, Refused
from protocol.sockets import ThreadLink

TASKS_PER_MESSAGE = 512
TASK_BYTES = 2_048
"""Bytes that are reckoned for a task in a message, without its note."""
TURN_BYTES = 32
"""Most bytes of a turn in a message."""
MINOR_OF_TASK_PARTS = 3
"""Minor version of the protocol since which tasks have notes, prefixes and bounds of branches."""
MINOR_OF_ROUTES = 4
"""Minor version since which a task may ask for the experts of its tokens."""


def messages_of(tasks: Sequence[Task]) -> list[PutTasks]:
    """Return messages with these tasks, each within the bounds of a header.

    Example:
        >>> tasks = [Task(task_id=f"g.{i}", env="e", group_id="g", group_size=20, note="x" * 16_000) for i in range(20)]
        >>> [len(message.tasks) for message in messages_of(tasks)]
        [14, 6]
    """
    messages: list[list[Task]] = []
    room = 0
    for task in tasks:
        size = TASK_BYTES + len(task.note.encode()) + _start_bytes(task)
        if not messages or size > room or len(messages[-1]) == TASKS_PER_MESSAGE:
            messages.append([])
            room = MAX_HEADER_BYTES
        messages[-1].append(task)
        room -= size
    return [PutTasks(tasks=each) for each in messages]


def refuse_older_broker(tasks: Sequence[Task], minor: int, broker: str) -> None:
    """Refuse a broker of an earlier version, which would lose a part of these tasks.

    Args:
        minor: minor version of the protocol that the broker speaks.
        broker: words that name the broker.

    Raises:
        BrokerRefused: the version is too early.
    """
    needed = max(map(minor_of, tasks), default=0)
    if minor >= needed:
        return
    lost, setting = (
        ("cannot ask for experts", 'learner.algorithm.routes = "behaviour"')
        if needed == MINOR_OF_ROUTES
        else (
            "has no notes and prefixes of tasks and no bound of branches",
            "[learner.family] and learner.sampling.max_context_tokens",
        )
    )
    raise BrokerRefused(
        f"{broker} speaks protocol {MAJOR}.{minor}, which {lost}; {setting} need {MAJOR}.{needed}: start a broker of "
        "this version, or take them out"
    )


def minor_of(task: Task) -> int:
    """Return the minor version of the protocol since which a broker loses no part of a task; 0: any."""
    if task.sampling.routes:
        return MINOR_OF_ROUTES
    parts = bool(task.note) or task.start is not None or task.sampling.max_context_tokens > 0
    return MINOR_OF_TASK_PARTS if parts else 0


def _start_bytes(task: Task) -> int:
    return 0 if task.start is None else len(task.start.token_ids) + TURN_BYTES * len(task.start.turns)


log = logging.getLogger(__name__)


class CommitSender:
    """Commits of an `Intake` on their way to the broker.

    Args:
        link: connection to the broker.
        intake: units, and which of them are to be committed.
        config: for `checkpoint_every`.
        step: learner step of the checkpoint that this process continues.
    """

    def __init__(self, link: ThreadLink, intake: Intake, config: LearnerConfig, *, step: int) -> None:
        self._link, self._intake, self._config = link, intake, config
        self._checkpointed: Checkpointed | None = None
        self._committed = step
        """Newest learner step of a Commit."""
        self._covered = step
        """Newest learner step that a checkpoint covers."""

    @property
    def _epoch(self) -> int:
        return self._intake.curriculum.epoch

    def flush(self, *, step: int) -> None:
        """Commit units that were dropped since the last call, and repeat commits that were lost.

        Dropped windows are context of later windows, so the broker must keep them until a checkpoint contains
        their segments. If a checkpoint already covers ``step``, they are committed with the next step.
        """
        self.recommit()
        later = self._intake.windows and self._config.checkpoint_every > 0 and self._covered == step
        self.commit([], step=step + later)

    def recommit(self) -> None:
        """Repeat commits that were lost."""
        again = self._intake.commits.recommit(self._epoch)
        for message in again:
            self._link.send(message)
        # The broker refused a checkpoint of a step whose commit it had lost.
        if again:
            self.repeat_checkpointed()

    def commit(
        self, trained: Sequence[Unit], *, step: int, version: int = -1, replayed_tokens: int = 0
    ) -> None:
        """Commit units that entered a gradient, and units that were dropped since the last call.

        Args:
            trained: units that entered a gradient.
            step: learner step that trained them.
            version: policy version that the step updated.
            replayed_tokens: number of replayed tokens that the step trained.
        """
        message = self._intake.commit(self._epoch, step, trained, replayed_tokens, version)
        if message is None:
            return
        if message.trained:
            log.debug("step %d trained %s", step, " ".join(message.trained))
        self._committed = max(self._committed, step)
        self._link.send(message)
        # Without checkpoints no learner will need the units again, so the broker may release them now.
        if not self._config.checkpoint_every:
            self.checkpointed(step=step)

    def checkpointed(self, *, step: int) -> None:
        """Tell the broker that a checkpoint covers ``step``; repeated at every join."""
        self._covered = step
        if step > self._committed:
            # The broker takes no checkpoint of a step that it does not know, and this step had no units.
            self._committed = step
            self._link.send(Commit(epoch=self._epoch, step=step))
        self._checkpointed = Checkpointed(epoch=self._epoch, step=step)
        self._link.send(self._checkpointed)

    def repeat_checkpointed(self) -> None:
        """Send the last Checkpointed again, if there was one."""
        if self._checkpointed is not None:
            self._link.send(self._checkpointed)


CREDIT_UNITS = 64
"""Units that the broker may deliver in advance."""
FATAL_CODES = ("queue_full", "bad_task", "malformed", "limit", "version")
"""Refusals of a message that the learner would otherwise wait for without end."""


class BrokerConnection:
    """Messages of the broker, each given to whom it concerns, and what is sent again after a join.

    Args:
        link: connection to the broker.
        intake: receives deliveries.
        commits: repeats commits.
        broker: words that name the broker.
    """

    def __init__(self, link: ThreadLink, intake: Intake, commits: CommitSender, broker: str) -> None:
        self._link, self._intake, self._commits, self._broker = link, intake, commits, broker
        self.drained = ""
        """Reason why the broker wants the run to end, or ""."""
        self.checkpoint_wanted = ""
        """Reason why the broker wants a checkpoint, or ""."""
        self.evaluating: list[Task] = []
        """Tasks of the evaluation in progress, which are put again at every join."""
        self.awaiting_held = False
        """True while `Exchange.inherit` or `confirm_commits` waits for a complete list of what the broker holds."""
        self.confirming = False
        """True while `Exchange.confirm_commits` waits until the broker holds no committed unit."""
        # Invariant: a thread of the publisher announces while this one joins, and nobody may overtake the other: the
        # broker refuses an earlier version after a later one.
        self._announcing = threading.Lock()
        self._announced: PublishWeights | None = None
        self._joins = 0
        """Joins that the main thread has read from the inbox."""
        self._held_tasks: list[str] = []
        self._held_units: list[str] = []

    def put(self, tasks: Sequence[Task]) -> None:
        """Send tasks to the broker, which ignores those that it has seen.

        Raises:
            BrokerRefused: the broker is of an earlier version, and would lose a part of a task.
        """
        if any(map(minor_of, tasks)):
            refuse_older_broker(tasks, self._link.session.minor, self._broker)
        for message in messages_of(tasks):
            self._link.send(message)

    def announce(self, message: PublishWeights) -> None:
        """Announce a new version to the broker; repeated at every join. Any thread may call this."""
        with self._announcing:
            self._announced = message
            self._link.send(message)

    def pump(self, timeout_s: float) -> bool:
        """Process all messages that have arrived; return whether a delivery was among them.

        Args:
            timeout_s: longest wait for the first message, in seconds; 0: do not wait.
        """
        before = self._intake.deliveries
        try:
            item = self._link.inbox.get(timeout=timeout_s) if timeout_s else self._link.inbox.get_nowait()
            while True:
                if item is None:
                    self._joined()
                elif isinstance(item, BaseException):
                    raise item
                else:
                    self._take_in(*item)
                item = self._link.inbox.get_nowait()
        except queue.Empty:
            return self._intake.deliveries > before

    def _take_in(self, message: AnyMessage, rest: list[bytes]) -> None:
        match message:
            case Drain(reason=reason):
                self.drained = reason or "drain"
            case CheckpointWanted(reason=reason):
                self.checkpoint_wanted = reason or "the broker asks for it"
            case Held(task_ids=task_ids, unit_ids=unit_ids, more=more):
                self._held_tasks += task_ids
                self._held_units += unit_ids
                if not more:
                    tasks, self._held_tasks = self._held_tasks, []
                    units, self._held_units = self._held_units, []
                    self._held(tasks, units)
            case Refused():
                text = f"the broker refused the learner ({message.code}): {message.message}"
                if message.fatal or message.code in FATAL_CODES:
                    raise BrokerRefused(text)
                log.warning("%s", text)
            case _:
                receive(self._intake, message, rest)
                if isinstance(message, Deliver):
                    self._credit(1)

    def _joined(self) -> None:
        """Repeat the last announcement and Checkpointed after a join, because the broker may have lost them.

        The broker ignores what it has seen. It gets delivery credit only after its Held messages: see
        `_held`.
        """
        self._joins += 1
        self._held_tasks, self._held_units = [], []
        with self._announcing:
            if self._announced is not None:
                self._link.send(self._announced)
        self._commits.repeat_checkpointed()

    def _held(self, task_ids: Sequence[str], unit_ids: Sequence[str]) -> None:
        """Process the list of what the broker holds, which it sends after each join.

        First the learner repeats lost commits: without them the broker would deliver those units again, or
        drop trained ones as stale. Then it grants delivery credit.
        """
        intake = self._intake
        lost = intake.commits.commit_again(unit_ids)
        self._commits.recommit()
        owed, self.awaiting_held = self.awaiting_held, False
        if self.confirming:
            self.confirming = lost > 0
            return
        again = intake.curriculum.adopt(task_ids) if owed else intake.awaited()
        self.put(again)
        self._ready_for_deliveries()
        if owed:
            log.info("the broker holds %d tasks of this lineage; told again of %d", len(task_ids), len(again))

    def _ready_for_deliveries(self) -> None:
        """Put unfinished evaluation tasks again, and grant delivery credit."""
        self.put([task for task in self.evaluating if task.group_id not in self._intake.evaluated])
        self._credit(CREDIT_UNITS)

    def _credit(self, units: int) -> None:
        """Grant credit for deliveries, tagged with the join that it answers.

        If the link joins again before it sends the credit, it drops the credit. Otherwise the broker could
        deliver before it has received the repeated commits.
        """
        self._link.send(DeliveryCredit(units=units), join=self._joins)


POLL_S = 0.2
TIME_LIMIT = "time limit"


class BrokerWait:
    """The wait for a batch or an evaluation, of which there is one at a time.

    Args:
        connection: its messages are processed while waiting.
        link: tells whether the broker answers.
        intake: tells what has arrived, and whether anything of it can be trained.
        config: for `start_timeout_s`, `data_timeout_s` and the limits of `SignalWatch`.
        stop_reason: returns why the run was asked to end, or "".
        broker: words that name the broker.
    """

    def __init__(
        self,
        connection: BrokerConnection,
        link: ThreadLink,
        intake: Intake,
        config: LearnerConfig,
        *,
        stop_reason: Callable[[], str],
        broker: str,
    ) -> None:
        self._connection, self._link, self._intake, self._config = connection, link, intake, config
        self._stop_reason, self._broker = stop_reason, broker
        self._patience_s = config.start_timeout_s
        # Invariant: the main thread writes waiting, _since and _wanted; the link's thread reads them in `gauges`.
        self.waiting = False
        """True while `until` waits for the broker."""
        self._since, self._wanted = 0.0, 0

    def until(
        self, done: Callable[[], bool], missing: Callable[[], str], *, limited: bool, wanted: int = 0
    ) -> None:
        """Wait until ``done`` returns True.

        Args:
            done: called after each look at the inbox.
            missing: returns what is missing, for the error message.
            limited: whether the run's time limit ends the wait, and groups with equal returns; SIGTERM and Drain
                always do.
            wanted: units that are waited for; 0: no units are.

        Raises:
            NoData: nothing arrived within the deadline.
            Stopped: the run was asked to end.
        """
        self._wanted = wanted
        self.waiting, self._since = True, time.monotonic()
        try:
            self._connection.pump(0.0)
            heard = time.monotonic()
            while True:
                reason = self.end_reason()
                if reason and (limited or reason != TIME_LIMIT):
                    raise Stopped(reason)
                looked = time.monotonic()
                if done():
                    return
                self._intake.signal.look(self._config, looked, training=limited)
                # Time inside `done`, which may write a checkpoint, does not count as waiting.
                heard += time.monotonic() - looked
                if self._connection.pump(POLL_S):
                    heard, self._patience_s = time.monotonic(), self._config.data_timeout_s
                elif time.monotonic() - heard > self._patience_s:
                    raise NoData(
                        f"nothing arrived for {self._patience_s:g} s: {missing()}; {self._where_to_look()}"
                    )
        finally:
            self.waiting = False
            self._wanted = 0

    def end_reason(self) -> str:
        """Return why the run was asked to end, by the broker or on this host, or ""."""
        return self._connection.drained or self._stop_reason()

    def gauges(self) -> tuple[tuple[str, float], ...]:
        """Return what the learner waits for, and since how many seconds, for its heartbeat."""
        signal = self._intake.signal
        rows: list[tuple[str, float]] = []
        if signal.uniform.length:
            rows = [
                ("uniform_groups_in_a_row", float(signal.uniform.length)),
                ("uniform_return", signal.uniform_return),
            ]
        if not self.waiting:
            return tuple(rows)
        waits = [*rows, ("waiting_seconds", time.monotonic() - self._since)]
        if wanted := self._wanted:
            waits += [("units_here", float(len(self._intake.ready))), ("units_wanted", float(wanted))]
        return tuple(waits)

    def _where_to_look(self) -> str:
        """Return the part of the error that says whom the learner waits for and where to look."""
        if not self._link.session.joined:
            return (
                f"{self._broker} is silent: start it again with its run folder, the learner goes on by itself"
            )
        return (
            f"{self._broker} answers, its /status says who waits for whom; its gauges: {self._intake.gauges}"
        )


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
