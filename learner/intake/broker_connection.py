"""The learner's connection to the broker: reads its messages, and repeats at each join what it may have lost."""

import logging
import queue
import threading
from collections.abc import Sequence

from learner.errors import BrokerRefused
from learner.intake.commit_sender import CommitSender
from learner.intake.deliveries import receive
from learner.intake.intake import Intake
from learner.intake.task_messages import messages_of, minor_of, refuse_older_broker
from protocol.codec import AnyMessage
from protocol.messages.episodes import CheckpointWanted, Deliver, DeliveryCredit, Held, Task
from protocol.messages.peers import Drain, PublishWeights, Refused
from protocol.sockets import ThreadLink

log = logging.getLogger(__name__)

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
