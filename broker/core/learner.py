"""The broker's side towards the learner: tasks in, units out, commits, weights. Pure.

A learner that joins hears what the broker holds; notices tell it of units that it will never get.
"""

import logging
import math
from collections import deque
from collections.abc import Iterable

from broker.core.peers import Peer
from broker.core.records import (
    Committed,
    Delivered,
    LearnerJoined,
    Published,
    Released,
    TasksPut,
    UnitDropped,
)
from broker.core.relays import REMIND_S, WeightsAnnouncer
from broker.core.state import BrokerState
from broker.core.tasks import Recent
from broker.core.units import counted_by_name, goes_back, no_step_back, process_of
from broker.errors import BrokerError, TryLater
from protocol import names
from protocol.codec import MAX_HEADER_BYTES
from protocol.messages.episodes import (
    Checkpointed,
    CheckpointWanted,
    Commit,
    Deliver,
    Dropped,
    Held,
    PutTasks,
    Task,
)
from protocol.messages.fields import MAX_IDS
from protocol.messages.peers import Hello, PublishWeights, Refused
from protocol.version_line import VersionLine

log = logging.getLogger(__name__)

ID_OVERHEAD, MESSAGE_OVERHEAD = 3, 1_024
"""Bytes of a string's head in MessagePack, and bytes reserved in a Held for everything but ids."""


def held_messages(state: BrokerState) -> list[Held]:
    """Return messages that list the tasks a learner need not put again, and the units it may be done with."""
    units = [unit.unit_id for unit in state.deliveries.units() if unit.deliveries]
    messages = [Held(task_ids=part, more=True) for part in _id_lists(_held_task_ids(state))]
    *others, last = _id_lists(units) or [[]]
    return [*messages, *(Held(unit_ids=part, more=True) for part in others), Held(unit_ids=last)]


def _held_task_ids(state: BrokerState) -> list[str]:
    """Return the training tasks that are queued, leased, or done and not committed."""
    live = [record.task.task_id for record in state.tasks.live() if record.task.purpose == "train"]
    return list(dict.fromkeys([*live, *done_task_ids(state, "train")]))


def done_task_ids(state: BrokerState, *purposes: str) -> list[str]:
    """Return the tasks that are done and whose last segment is held.

    The last window of a trajectory may be committed before others; then the task is left out.
    """
    units = [unit for unit in state.deliveries.units() if unit.purpose in purposes and not unit.context]
    done = [stored.key[0] for unit in units for stored in unit.segments]
    if "train" in purposes:
        done += [t.trajectory_id for group in state.assembly.groups.values() for t in group.here]
    return [names.task_of(trajectory) for trajectory in done]


def _id_lists(ids: Iterable[str]) -> list[list[str]]:
    """Split ids into lists, each as long as one message can hold."""
    parts, room = list[list[str]](), 0
    for one in ids:
        size = len(one.encode()) + ID_OVERHEAD
        if size > room or len(parts[-1]) == MAX_IDS:
            parts.append([])
            room = MAX_HEADER_BYTES - MESSAGE_OVERHEAD
        parts[-1].append(one)
        room -= size
    return parts


MAX_NOTICES = 65_536


class Notices:
    """The notices that wait for the learner, and what it got notices of."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._waiting: deque[Dropped] = deque(maxlen=MAX_NOTICES)
        self._noticed = Recent(MAX_NOTICES)
        """Ids of groups and tasks that the learner got notices of since its last Hello."""

    def forget(self) -> None:
        """Forget what the learner got notices of, because it may have missed them."""
        self._noticed = Recent(MAX_NOTICES)

    def tell_over(self, tasks: list[Task]) -> None:
        """Repeat the notices of tasks that are over: a learner that puts such tasks again has missed them."""
        over = [task for task in tasks if task.task_id in self._state.tasks.over]
        if not over:
            return
        if self._state.assembly.mode == "group":
            self._tell_groups_over([task for task in over if task.purpose == "train"])
            over = [task for task in over if task.purpose == "eval"]
        done = set(done_task_ids(self._state, "train", "eval"))
        for task in over:
            if task.task_id not in done and task.task_id not in self._noticed:
                self._noticed.add(task.task_id, 0)
                notice = Dropped(unit_id=task.task_id, group_id=task.group_id, trajectories=1, reason="over")
                self._waiting.append(notice)

    def _tell_groups_over(self, tasks: list[Task]) -> None:
        """Repeat the notices of whole groups that are over, where members are delivered together."""
        state = self._state
        over: dict[str, list[Task]] = {}
        for task in tasks:
            if task.group_id not in self._noticed:
                over.setdefault(task.group_id, []).append(task)
        held = state.tasks.groups() | {unit.group_id for unit in state.deliveries.units()}
        for group_id in sorted(over.keys() - held - state.assembly.groups.keys()):
            trajectories = len(over[group_id])
            notice = Dropped(unit_id=group_id, group_id=group_id, trajectories=trajectories, reason="over")
            self._waiting.append(notice)

    def send(self, learner: str | None) -> None:
        """Tell the learner which units it will never get; while it is away (None), the notices wait."""
        if self._state.notices:
            self._waiting.extend(self._state.take_notices())
        while learner is not None and self._waiting:
            notice = self._waiting.popleft()
            self._noticed.add(notice.group_id, 0)
            self._state.outbox.send(learner, notice)


MAX_CREDIT = 1 << 20


class LearnerSide:
    """The one live learner, its notices and deliveries, and the newest policy version."""

    def __init__(self, state: BrokerState, announcer: WeightsAnnouncer) -> None:
        self._state, self._announcer = state, announcer
        self.learner: Peer | None = None
        self._asked_at = self._failed_at = -math.inf
        self._notices = Notices(state)
        self.stepped_at: float | None = None
        """Time of the newest learner step; before the first one, time when a learner joined; None: none has."""

    @property
    def policy_version(self) -> int:
        return self._state.published.version if self._state.published else 0

    def starving(self, now: float) -> bool:
        """Return whether the learner waits for units while none is ready.

        A learner that says it is busy does not wait, as long as it makes progress.
        """
        learner = self.learner
        if learner is None or learner.delivery_credit == 0 or self._state.deliveries.ready:
            return False
        return not learner.heartbeat.busy or learner.stalled_for(now) > self._state.config.generator_stall_s

    # --- joining and leaving ------------------------------------------------------------------------------

    def objection(self, hello: Hello) -> Refused | None:
        """Return the refusal that a learner would get for this Hello, or None.

        A learner of a lower epoch is too late, and each epoch has only one live learner. A learner with fewer
        steps than were released needs permission, because nobody can train the units between again.
        """
        before = self._state.lineage
        if before is None:
            return None
        if hello.epoch < before.epoch:
            text = f"epoch {hello.epoch} is over, a learner of epoch {before.epoch} has joined"
            return Refused(code="stale_epoch", message=text, fatal=True)
        if hello.epoch == before.epoch and self.learner is not None and self.learner.name != hello.peer:
            text = f"learner {self.learner.name!r} of the same epoch {hello.epoch} is alive"
            return Refused(code="second_learner", message=text)
        if not hello.step_back and goes_back(self._state.steps, before, hello):
            return no_step_back(self._state.steps, hello.step)
        return None

    def joined(self, peer: Peer, now: float) -> None:
        """Let a learner take over. Leased units become ready again, because they may have been lost.

        A process that comes back after a silence may still hold units that were delivered to it. Units
        delivered to another process do not count as held any more.
        """
        state, before = self._state, self._state.lineage
        if self.learner is not None and self.learner.name != peer.name:
            text = f"a learner of epoch {peer.hello.epoch} has joined"
            state.outbox.refuse(self.learner.name, "stale_epoch", text, fatal=True)
            state.peers.remove(self.learner.name)
        self.learner = peer
        if self.stepped_at is None:
            self.stepped_at = now
        state.deliveries.expire_all(void=False)
        if before is not None and goes_back(state.steps, before, peer.hello):
            lost = counted_by_name(state.steps.behind(peer.hello.step))
            log.warning(
                "the learner goes back from step %d to %d: %s are lost",
                state.steps.released,
                peer.hello.step,
                lost,
            )
        if (
            before is None
            or process_of(before) != process_of(peer.hello)
            or before.deliver != peer.hello.deliver
        ):
            state.record(LearnerJoined(hello=peer.hello), now)
        self._notices.forget()

    def welcome(self, peer: Peer) -> None:
        """Send the learner the tasks that it need not put again, and the units that it may be done with."""
        for message in held_messages(self._state):
            self._state.outbox.send(peer.name, message)

    def left(self, peer: Peer, *, on_purpose: bool) -> None:
        """Note that the learner left. A silent one keeps its deliveries: nobody else could take them."""
        if peer is not self.learner:
            return
        self.learner = None
        if on_purpose:
            self._state.deliveries.expire_all(void=True)

    # --- messages -----------------------------------------------------------------------------------------

    def credited(self, peer: Peer, units: int) -> None:
        peer.delivery_credit = min(MAX_CREDIT, peer.delivery_credit + units)

    def put_tasks(self, peer: Peer, message: PutTasks, now: float) -> None:
        """Queue new tasks, all or none."""
        state = self._state
        fresh = state.tasks.unseen(message.tasks)
        if len(fresh) > state.tasks.room():
            text = (
                f"{len(fresh)} new tasks beside {state.tasks.queued} queued ones exceed max_queued_tasks = "
                f"{state.config.max_queued_tasks}; none was taken: put them later, or raise the limit"
            )
            state.outbox.refuse(peer.name, "queue_full", text)
            return
        if fresh:
            for wrong in state.record(TasksPut(tasks=fresh), now):
                state.outbox.refuse(peer.name, "bad_task", wrong)
        self._notices.tell_over(message.tasks)

    def commit(self, peer: Peer, message: Commit, now: float) -> bool:
        """Commit the units that the learner is done with; return False if the Commit is refused."""
        if not self._of_this_epoch(peer, message.epoch, "Commit"):
            return False
        peer.grew_at = peer.progress_at = now
        if message.step > self._state.steps.committed:
            self.stepped_at = now
        committed = Committed(
            epoch=message.epoch,
            step=message.step,
            trained=message.trained,
            dropped=message.dropped,
            replayed_tokens=message.replayed_tokens,
            version=message.version,
        )
        self._state.record(committed, now)
        self._complain(peer, self._state.miscount())
        return True

    def check_ledger(self) -> None:
        """Check that the ledger closes to the token. Call it at intervals: it walks over all that is held."""
        if self.learner is not None:
            self._complain(self.learner, self._state.violation())

    def _complain(self, peer: Peer, difference: str) -> None:
        if difference:
            text = f"the ledger does not close: {difference}; this is a fault of the broker, its journal has the rest"
            self._state.outbox.refuse(peer.name, "ledger_violation", text, fatal=True)

    def checkpointed(self, peer: Peer, message: Checkpointed, now: float) -> None:
        """Release what is committed up to this step, because a checkpoint covers it."""
        if not self._of_this_epoch(peer, message.epoch, "Checkpointed"):
            return
        committed = self._state.steps.committed
        if message.step > committed:
            text = (
                f"Checkpointed of step {message.step}, but step {committed} is the newest that was committed; commit "
                "the step first, without units if it has none"
            )
            self._state.outbox.refuse(peer.name, "not_committed", text)
        else:
            self._state.record(Released(epoch=message.epoch, step=message.step), now)

    def publish(self, peer: Peer, message: PublishWeights, now: float) -> None:
        """Note the newest policy version, and announce it to the generators."""
        if not self._of_this_epoch(peer, message.epoch, "PublishWeights"):
            return
        newest, offered = self._state.published, (message.epoch, message.version)
        if newest is not None and offered < (newest.epoch, newest.version):
            text = f"version {message.version} is older than {newest.version}, published in this epoch"
            self._state.outbox.refuse(peer.name, "stale_version", text)
            return
        if why := _why_no_line(message):
            self._state.outbox.refuse(peer.name, "bad_line", why)
            return
        event = Published(
            epoch=message.epoch,
            version=message.version,
            manifest=message.manifest,
            url=message.url,
            root=message.root,
            line=message.line,
        )
        if event != newest:
            self._state.record(event, now)
        self._announcer.published(now)

    def _of_this_epoch(self, peer: Peer, epoch: int, what: str) -> bool:
        if epoch == peer.hello.epoch:
            return True
        text = f"{what} of epoch {epoch}, but the learner joined with epoch {peer.hello.epoch}"
        self._state.outbox.refuse(peer.name, "stale_epoch", text, fatal=epoch < peer.hello.epoch)
        return False

    # --- deliveries ---------------------------------------------------------------------------------------

    def send_notices(self) -> None:
        """Tell the learner which units it will never get; while it is away, the notices wait."""
        self._notices.send(self.learner.name if self.learner is not None else None)

    def deliver(self, now: float) -> None:
        """Lease ready units to the learner, in the order of delivery, as far as its credit reaches."""
        state, learner = self._state, self.learner
        while learner is not None and learner.delivery_credit > 0:
            unit = state.deliveries.next()
            if unit is None:
                return
            if state.deliveries.is_stale(unit, self.policy_version, state.line):
                state.record(UnitDropped(unit_id=unit.unit_id, outcome="stale"), now)
                continue
            if unit.processes >= state.config.max_deliveries and unit.epoch != learner.hello.epoch:
                state.record(UnitDropped(unit_id=unit.unit_id, outcome="poison"), now)
                continue
            try:
                frames = state.deliveries.frames(unit)
            except TryLater as error:
                # The machine lacks descriptors or memory for the moment, but the unit is not lost.
                if now - self._failed_at >= REMIND_S:
                    log.error("unit %s cannot be delivered now: %s", unit.unit_id, error)
                    self._failed_at = now
                return
            except BrokerError as error:
                log.error("unit %s cannot be delivered: %s", unit.unit_id, error)
                state.record(UnitDropped(unit_id=unit.unit_id, outcome="damaged"), now)
                continue
            learner.delivery_credit -= 1
            deliver = Deliver(
                unit_id=unit.unit_id,
                segments=len(unit.segments),
                complete=unit.complete,
                redelivered=unit.deliveries > 0,
            )
            state.record(Delivered(unit_id=unit.unit_id, epoch=learner.hello.epoch), now)
            state.deliveries.leased_at(unit.unit_id, now)
            state.outbox.send(learner.name, deliver, frames)

    def sweep(self, now: float) -> None:
        """End leases of a learner without progress; ask for a checkpoint if the store is crowded."""
        state = self._state
        state.deliveries.expire(self.learner.grew_at if self.learner else 0.0, now)
        if (
            state.store.crowded
            and state.deliveries.committed
            and self.learner is not None
            and now - self._asked_at >= REMIND_S
        ):
            self._asked_at = now
            reason = f"{state.store.committed_nbytes} bytes are kept until a checkpoint covers them"
            state.outbox.send(self.learner.name, CheckpointWanted(reason=reason))


def _why_no_line(message: PublishWeights) -> str:
    """Return what is wrong with the version line of the weights, or ""."""
    try:
        start = VersionLine(message.line).start
    except ValueError as error:
        return str(error)
    return f"its line begins at {start}, behind version {message.version}" if start > message.version else ""
