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
from learner.intake.intake import Intake
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
from protocol.messages.fields import RunEnd
from protocol.messages.peers import Drain, PublishWeights, Refused
from protocol.sockets import BlockingLink

TASKS_PER_MESSAGE = 512
TASK_BYTES = 2_048
"""Bytes that are reckoned for a task in a message, without its note."""
TURN_BYTES = 32
"""Most bytes of a turn in a message."""
MINOR_OF_TASK_PARTS = 3
"""Minor version of the protocol since which tasks have notes, prefixes and bounds of branches."""
MINOR_OF_ROUTES = 4
"""Minor version since which a task may ask for the experts of its tokens."""
MINOR_OF_TEACHERS = 7
"""Minor version since which a task may name a teacher."""
MINOR_OF_OPENINGS = 8
"""Minor version since which a task may begin the first answer."""


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
    lost, setting = {
        MINOR_OF_OPENINGS: ("cannot begin answers", '[learner.reward.group] of kind "modes"'),
        MINOR_OF_TEACHERS: (
            "cannot hand tasks to teachers",
            "learner.family.teachers and learner.family.judge",
        ),
        MINOR_OF_ROUTES: ("cannot ask for experts", 'learner.algorithm.routes = "behaviour"'),
        MINOR_OF_TASK_PARTS: (
            "has no notes and prefixes of tasks and no bound of branches",
            "[learner.family] and learner.sampling.max_context_tokens",
        ),
    }[needed]
    raise BrokerRefused(
        f"{broker} speaks protocol {MAJOR}.{minor}, which {lost}; {setting} need {MAJOR}.{needed}: start a broker of "
        "this version, or take them out"
    )


def minor_of(task: Task) -> int:
    """Return the minor version of the protocol since which a broker loses no part of a task; 0: any."""
    if task.opening:
        return MINOR_OF_OPENINGS
    if task.policy:
        return MINOR_OF_TEACHERS
    if task.sampling.routes:
        return MINOR_OF_ROUTES
    parts = bool(task.note) or task.start is not None or task.sampling.max_context_tokens > 0
    return MINOR_OF_TASK_PARTS if parts else 0


def _start_bytes(task: Task) -> int:
    return 0 if task.start is None else len(task.start.token_ids) + TURN_BYTES * len(task.start.turns)


log = logging.getLogger(__name__)

POLL_S = 0.2
TIME_LIMIT = "time limit"
HELD_TIMEOUT_S = 180.0
"""Longest wait for Held messages; longer than a restart of the broker takes."""
CONFIRM_TIMEOUT_S = 15.0
CREDIT_UNITS = 64
"""Units that the broker may deliver in advance."""
NO_CAPACITY = "fleet/no_capacity_now_seconds"
"""The broker's gauge of how long tasks have waited without generators or actors."""
FATAL_CODES = ("queue_full", "bad_task", "malformed", "limit", "version")
"""Refusals of a message that the learner would otherwise wait for without end."""


class BrokerSession:
    """The learner's side of its connection to the broker: blocking calls over a link.

    Every wait has a deadline, and its error says what is missing. A connection may break at any moment and lose what
    was under way; the link then joins again by itself. So the session remembers what it announced, committed and asked
    for, and repeats at each join what the broker may have lost. The broker ignores what it has seen.

    Args:
        link: connection to the broker.
        curriculum: deals out the tasks.
        config: for the size of a batch, timeouts, `checkpoint_every` and the limits of `SignalWatch`.
        lockstep: whether no token may be sampled while the weights change.
        stop_reason: returns why the run was asked to end, or "".
        broker: address of the broker, for error messages.
        step: learner step of the checkpoint that this process continues.
        no_capacity_s: longest wait while no generator serves or no actor is there, in seconds. It counts where it is
            longer than the wait for data.
    """

    def __init__(
        self,
        link: BlockingLink,
        curriculum: Curriculum,
        config: LearnerConfig,
        *,
        lockstep: bool,
        stop_reason: Callable[[], str],
        broker: str = "",
        step: int = 0,
        no_capacity_s: float = 0.0,
    ) -> None:
        self._no_capacity_s = no_capacity_s
        self._link, self._config, self.lockstep, self._stop_reason = link, config, lockstep, stop_reason
        self._broker = f"the broker at {broker}" if broker else "the broker"
        self.curriculum = curriculum
        self.intake = Intake(curriculum, config.drops_uniform_groups, windows=config.train_on == "windows")
        self.while_waiting: Callable[[], None] = lambda: None
        """Function that is called while waiting, after each look at the inbox."""
        # What the broker has asked for.
        self.drained = ""
        """Reason why the broker wants the run to end, or ""."""
        self.checkpoint_wanted = ""
        """Reason why the broker wants a checkpoint, or ""; who writes one sets it to ""."""
        # What is repeated at a join, because the broker may have lost it.
        # Invariant: a thread of the publisher announces while this one joins, and nobody may overtake the other: the
        # broker refuses an earlier version after a later one.
        self._announcing = threading.Lock()
        self._announced: PublishWeights | None = None
        self._checkpointed: Checkpointed | None = None
        self._evaluating: list[Task] = []
        """Tasks of the evaluations in progress."""
        self._committed_step = self._covered_step = step
        """Newest learner step of a Commit, and newest one that a checkpoint covers."""
        # What the broker holds, which it lists after each join.
        self._joins = 0
        """Joins that the main thread has read from the inbox."""
        self._held_tasks: list[str] = []
        self._held_units: list[str] = []
        self._awaiting_held = False
        """True while `inherit` or `confirm_commits` waits for a complete list of what the broker holds."""
        self._confirming = False
        """True while `confirm_commits` waits until the broker holds no committed unit."""
        # How long this session waits.
        self._patience_s = config.start_timeout_s
        # Invariant: the main thread writes these three; the link's thread reads them in `gauges`.
        self.waiting = False
        """True while `collect` or `evaluate` waits for the broker. Any thread may ask."""
        self._waiting_since, self._units_wanted = 0.0, 0

    # --- what the run asks for ---

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

        self._wait_until(enough, missing, limited=True, units_wanted=wanted * batches)
        return self.intake.take_batch(wanted, in_order=self.lockstep)

    def evaluate(self, tag: str, of: EvaluationConfig, *, version: int) -> list[Trajectory | None]:
        """Run the episodes of an evaluation set, sampled by ``version`` or a later one.

        The run's time limit does not end an evaluation.

        Returns:
            One trajectory for each answer, in the order of the tasks; None for one that was given up.

        Raises:
            NoData: nothing arrived within the deadline.
            Stopped: the run was asked to end, not by its time limit.
        """
        tasks = self.begin_evaluation(tag, of, version=version)
        try:
            self.await_evaluation(tag, tasks)
        finally:
            answers = self.end_evaluation(tasks)
        return answers

    def begin_evaluation(self, tag: str, of: EvaluationConfig, *, version: int) -> list[Task]:
        """Put the tasks of an evaluation set, which ``version`` or a later one samples. Return them."""
        tasks = self.curriculum.evaluation(tag, version, of)
        self._evaluating += tasks
        self.put_tasks(tasks)
        return tasks

    def evaluation_out(self, tasks: Sequence[Task]) -> int:
        """Return how many of these tasks have neither come back nor been given up."""
        return sum(task.group_id not in self.intake.evaluated for task in tasks)

    def await_evaluation(self, tag: str, tasks: Sequence[Task]) -> None:
        """Wait until all tasks of an evaluation have come back or been given up; the learner stands meanwhile.

        Raises:
            NoData: nothing arrived within the deadline.
            Stopped: the run was asked to end, not by its time limit.
        """

        def out() -> int:
            return self.evaluation_out(tasks)

        def missing() -> str:
            return f"evaluation {tag!r}: {out()} of {len(tasks)} tasks are out"

        def done() -> bool:
            self.while_waiting()
            return not out()

        self._wait_until(done, missing, limited=False)

    def end_evaluation(self, tasks: Sequence[Task]) -> list[Trajectory | None]:
        """Return the answers to these tasks, in their order, and forget the tasks.

        None stands for a task that was given up, or that is still out.
        """
        over = {task.group_id for task in tasks}
        self._evaluating = [task for task in self._evaluating if task.group_id not in over]
        return [self.intake.evaluated.pop(task.group_id, None) for task in tasks]

    def inherit(self) -> None:
        """Wait for the broker's list of held tasks of the continued lineage, and adopt them.

        Raises:
            NoData: the list did not come within `HELD_TIMEOUT_S`.
            Stopped: the run was asked to end.
        """
        self._awaiting_held, deadline = True, time.monotonic() + HELD_TIMEOUT_S
        self.intake.remembers_notices = True
        while self._awaiting_held:
            if reason := self.end_reason():
                raise Stopped(reason)
            if time.monotonic() > deadline:
                raise NoData(
                    f"{self._broker} has not said within {HELD_TIMEOUT_S:g} s what it holds of lineage "
                    f"{self.curriculum.lineage}; look at its log and its /status, then start the learner again "
                    "with --resume"
                )
            self.receive_messages(POLL_S)

    def confirm_commits(self, *, step: int) -> None:
        """Make sure, before leaving, that the broker has received all commits.

        A commit may be lost with its connection, without an error. So the learner joins again, which makes
        the broker list the units that it holds, and repeats the commits of those units, until none is left.
        If the broker does not answer within `CONFIRM_TIMEOUT_S`, a learner that continues this lineage
        repeats them.
        """
        deadline = time.monotonic() + CONFIRM_TIMEOUT_S
        self._confirming = True
        self.flush(step=step)
        while self._confirming:
            self._awaiting_held = True
            self._link.rejoin()
            while self._awaiting_held:
                if time.monotonic() > deadline:
                    log.warning(
                        "%s has not confirmed within %g s what was committed last; a learner that resumes this run "
                        "will tell it again",
                        self._broker,
                        CONFIRM_TIMEOUT_S,
                    )
                    return
                self.receive_messages(POLL_S)

    def close(self, then: RunEnd = "resumed") -> None:
        """Tell the broker that the learner leaves, and what becomes of the run; then close the connection."""
        self._link.close("done" if then == "over" else "the run will be resumed", then)

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

    # --- what is sent ---

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        """Send tasks to the broker, which ignores those that it has seen.

        Raises:
            BrokerRefused: the broker is of an earlier version, and would lose a part of a task.
        """
        if any(map(minor_of, tasks)):
            refuse_older_broker(tasks, self._link.session.minor, self._broker)
        for message in messages_of(tasks):
            self._link.send(message)

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
        self.put_tasks(tasks)

    def trained(self, *, update_s: float, step_s: float) -> None:
        """Note how long a step took, for how much work may be under way; see `UnderWay.trained`."""
        if self.curriculum.under_way is not None:
            self.curriculum.under_way.trained(update_s, step_s)

    def announce(self, message: PublishWeights) -> None:
        """Announce a new version to the broker; repeated at every join. Any thread may call this."""
        with self._announcing:
            self._announced = message
            self._link.send(message)

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
        message = self.intake.commit(self.curriculum.epoch, step, trained, replayed_tokens, version)
        if message is None:
            return
        if message.trained:
            log.debug("step %d trained %s", step, " ".join(message.trained))
        self._committed_step = max(self._committed_step, step)
        self._link.send(message)
        # Without checkpoints no learner will need the units again, so the broker may release them now.
        if not self._config.checkpoint_every:
            self.checkpointed(step=step)

    def flush(self, *, step: int) -> None:
        """Commit units that were dropped since the last call, and repeat commits that were lost.

        Dropped windows are context of later windows, so the broker must keep them until a checkpoint contains
        their segments. If a checkpoint already covers ``step``, they are committed with the next step.
        """
        self._recommit()
        later = self.intake.windows and self._config.checkpoint_every > 0 and self._covered_step == step
        self.commit([], step=step + later)

    def checkpointed(self, *, step: int) -> None:
        """Tell the broker that a checkpoint covers ``step``; repeated at every join."""
        self._covered_step = step
        for number, text in self.curriculum.checkpointed():
            log.info("instruction %d, which the policy proposed, is drawn from now on: %r", number, text)
        if step > self._committed_step:
            # The broker takes no checkpoint of a step that it does not know, and this step had no units.
            self._committed_step = step
            self._link.send(Commit(epoch=self.curriculum.epoch, step=step))
        self._checkpointed = Checkpointed(epoch=self.curriculum.epoch, step=step)
        self._link.send(self._checkpointed)

    def _recommit(self) -> None:
        """Repeat commits that were lost."""
        again = self.intake.commits.recommit(self.curriculum.epoch)
        for message in again:
            self._link.send(message)
        # The broker refused a checkpoint of a step whose commit it had lost.
        if again:
            self._repeat_checkpointed()

    def _repeat_checkpointed(self) -> None:
        if self._checkpointed is not None:
            self._link.send(self._checkpointed)

    def _grant_credit(self, units: int) -> None:
        """Grant credit for deliveries, tagged with the join that it answers.

        If the link joins again before it sends the credit, it drops the credit. Otherwise the broker could
        deliver before it has received the repeated commits.
        """
        self._link.send(DeliveryCredit(units=units), join=self._joins)

    # --- what is received ---

    def receive_messages(self, timeout_s: float) -> bool:
        """Process all messages that have arrived; return whether a delivery was among them.

        Args:
            timeout_s: longest wait for the first message, in seconds; 0: do not wait.
        """
        before = self.intake.deliveries
        try:
            item = self._link.inbox.get(timeout=timeout_s) if timeout_s else self._link.inbox.get_nowait()
            while True:
                if item is None:
                    self._repeat_at_join()
                elif isinstance(item, BaseException):
                    raise item
                else:
                    self._handle_message(*item)
                item = self._link.inbox.get_nowait()
        except queue.Empty:
            return self.intake.deliveries > before

    def _handle_message(self, message: AnyMessage, rest: list[bytes]) -> None:
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
                    self._answer_held(tasks, units)
            case Refused():
                text = f"the broker refused the learner ({message.code}): {message.message}"
                if message.fatal or message.code in FATAL_CODES:
                    raise BrokerRefused(text)
                log.warning("%s", text)
            case _:
                self.intake.receive(message, rest)
                if isinstance(message, Deliver):
                    self._grant_credit(1)

    def _repeat_at_join(self) -> None:
        """Repeat the last announcement and Checkpointed after a join, because the broker may have lost them.

        The broker gets delivery credit only after its Held messages: see `_answer_held`.
        """
        self._joins += 1
        self._held_tasks, self._held_units = [], []
        with self._announcing:
            if self._announced is not None:
                self._link.send(self._announced)
        self._repeat_checkpointed()

    def _answer_held(self, task_ids: Sequence[str], unit_ids: Sequence[str]) -> None:
        """Process the list of what the broker holds, which it sends after each join.

        First the learner repeats lost commits: without them the broker would deliver those units again, or
        drop trained ones as stale. Then it puts again what the broker does not hold, and grants delivery credit.
        """
        lost = self.intake.commits.repeat_commits_of(unit_ids)
        self._recommit()
        owed, self._awaiting_held = self._awaiting_held, False
        if self._confirming:
            self._confirming = lost > 0
            return
        again = self.curriculum.adopt(task_ids) if owed else self.intake.unanswered_tasks()
        if owed:
            self.intake.note_over_unseen()
        self.put_tasks(again)
        self.put_tasks([task for task in self._evaluating if task.group_id not in self.intake.evaluated])
        self._grant_credit(CREDIT_UNITS)
        if owed:
            log.info("the broker holds %d tasks of this lineage; told again of %d", len(task_ids), len(again))

    # --- waiting ---

    def _wait_until(
        self, done: Callable[[], bool], missing: Callable[[], str], *, limited: bool, units_wanted: int = 0
    ) -> None:
        """Process messages until ``done`` returns True.

        Args:
            done: called after each look at the inbox.
            missing: returns what is missing, for the error message.
            limited: whether the run's time limit ends the wait, and groups with equal returns; SIGTERM and Drain
                always do.
            units_wanted: units that are waited for; 0: no units are.

        Raises:
            NoData: nothing arrived within the deadline.
            Stopped: the run was asked to end.
        """
        self._units_wanted = units_wanted
        self.waiting, self._waiting_since = True, time.monotonic()
        try:
            self.receive_messages(0.0)
            heard = time.monotonic()
            while True:
                reason = self.end_reason()
                if reason and (limited or reason != TIME_LIMIT):
                    raise Stopped(reason)
                looked = time.monotonic()
                if done():
                    return
                self.intake.signal.look(
                    self._config, looked, training=limited, trained=self.intake.trained_tokens > 0
                )
                # Time inside `done`, which may write a checkpoint, does not count as waiting.
                heard += time.monotonic() - looked
                if self.receive_messages(POLL_S):
                    heard, self._patience_s = time.monotonic(), self._config.data_timeout_s
                elif (lacking_s := self._no_capacity_now_s) > 0:
                    if lacking_s > max(self._no_capacity_s, self._patience_s):
                        raise NoData(
                            f"for {lacking_s:g} s no generator has served, or no actor was there "
                            f"(fleet.no_capacity_minutes): {missing()}; {self._where_to_look()}"
                        )
                    # Nobody could have sent anything, so this is no silence.
                    heard = time.monotonic()
                elif time.monotonic() - heard > self._patience_s:
                    raise NoData(
                        f"nothing arrived for {self._patience_s:g} s: {missing()}; {self._where_to_look()}"
                    )
        finally:
            self.waiting = False
            self._units_wanted = 0

    @property
    def _no_capacity_now_s(self) -> float:
        """Seconds for which tasks have waited without generators or actors, as the broker says; 0 if it is silent."""
        return self.intake.gauges.get(NO_CAPACITY, 0.0) if self._link.session.joined else 0.0

    def end_reason(self) -> str:
        """Return why the run was asked to end, by the broker or on this host, or ""."""
        return self.drained or self._stop_reason()

    def gauges(self) -> tuple[tuple[str, float], ...]:
        """Return what the learner waits for, and since how many seconds, for its heartbeat. Any thread may ask."""
        signal = self.intake.signal
        rows: list[tuple[str, float]] = []
        if signal.uniform.length:
            rows = [
                ("uniform_groups_in_a_row", float(signal.uniform.length)),
                ("uniform_return", signal.uniform_return),
            ]
        if not self.waiting:
            return tuple(rows)
        waits = [*rows, ("waiting_seconds", max(0.0, time.monotonic() - self._waiting_since))]
        if wanted := self._units_wanted:
            waits += [("units_here", float(len(self.intake.ready))), ("units_wanted", float(wanted))]
        return tuple(waits)

    def _where_to_look(self) -> str:
        """Return the part of the error that says whom the learner waits for and where to look."""
        if not self._link.session.joined:
            return (
                f"{self._broker} is silent: start it again with its run folder, the learner goes on by itself"
            )
        return (
            f"{self._broker} answers, its /status says who waits for whom; its gauges: {self.intake.gauges}"
        )
