"""The broker towards actors: leases out, segments in, credit. Pure."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from broker.core.admission import why_invalid
from broker.core.events import Leased, LeaseEnded
from broker.core.peers import Peer
from broker.core.records import TaskRecord
from broker.core.state import BrokerState
from protocol import names
from protocol.codec import Buffer
from protocol.messages import CancelTask, LeaseTask, Segment, SegmentAck, SegmentCredit, TaskRejected
from protocol.session import MISSED_BEATS

Judgement = tuple[Literal["stored", "duplicate", "refused"], str]
"""Of a segment: what the actor is told."""
DRAINING = "draining"
FULL = "full"
MAX_CREDIT = 1 << 20
ABSENT_BEATS = 3 * MISSED_BEATS
"""After a restart of the broker, actors have so long to come back for their leases."""


class ActorSide:
    """Who runs which task, and what becomes of the segments that come back."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._absent_s = ABSENT_BEATS * state.config.heartbeat_s
        self._hungry: OrderedDict[str, Peer] = OrderedDict()
        """Actors with task credit, the next one to be served first."""

    @property
    def hungry(self) -> bool:
        """Whether an actor could run a task that is queued."""
        return bool(self._hungry) and self._state.tasks.waiting

    # --- joining and leaving ------------------------------------------------------------------------------

    def tell_leases(self, peer: Peer, now: float) -> None:
        """Before the Welcome: leases of this very process may have been lost on the way; those of another are over.

        So the task credit that the actor announces after the Welcome counts them in.
        """
        for record in reversed(self._state.tasks.held_by(peer.name)):
            assert record.lease is not None
            if record.lease.incarnation == peer.hello.incarnation:
                self._tell(record)
            else:
                self.end_lease(record, "", now)

    def joined(self, peer: Peer, *, trickle: bool) -> None:
        """A Hello, the first or a repeated one: both sides count credit from zero."""
        self._hungry.pop(peer.name, None)
        self._state.flow.join(peer.name)
        self.grant(peer.name, trickle=trickle)

    def left(self, peer: Peer, now: float, *, fault: bool) -> None:
        """What the actor ran goes back to the front of the queue, in its old order."""
        self._hungry.pop(peer.name, None)
        self._state.flow.leave(peer.name)
        for record in reversed(self._state.tasks.held_by(peer.name)):
            self.end_lease(record, "", now, fault=fault)

    def credited(self, peer: Peer, tasks: int) -> None:
        """The actor can run more tasks."""
        peer.task_credit = min(MAX_CREDIT, peer.task_credit + tasks)
        if peer.task_credit:
            self._hungry[peer.name] = peer

    # --- tasks out ----------------------------------------------------------------------------------------

    def lease_tasks(self, now: float) -> None:
        """Lease queued tasks as far as task credit reaches."""
        state, tasks = self._state, self._state.tasks
        while self._hungry and (found := tasks.next(self._choose, now)):
            record, peer = found
            leased = Leased(
                task_id=record.task.task_id,
                lease_id=tasks.new_lease_id(),
                actor=peer.hello.peer,
                incarnation=peer.hello.incarnation,
            )
            state.record(leased, now)
            self._tell(record)

    def _tell(self, record: TaskRecord) -> None:
        assert record.lease is not None
        lease = LeaseTask(lease_id=record.lease.lease_id, attempt=record.attempt, task=record.task)
        self._state.send(record.lease.actor, lease)

    def _choose(self, record: TaskRecord, now: float) -> Peer | None:
        """The next actor in turn; one that has rejected this task only if there is no other."""
        for name, peer in self._hungry.items():
            if name == record.avoid and (now < record.retry_at or len(self._state.peers.of("actor")) > 1):
                continue
            peer.task_credit -= 1
            if peer.task_credit:
                self._hungry.move_to_end(name)
            else:
                del self._hungry[name]
            return peer
        return None

    def rejected(self, peer: Peer, message: TaskRejected, now: float) -> None:
        """The actor does not want a task; with the reason "draining" or "full" it wants no other either."""
        record = self._state.tasks.by_lease(message.lease_id)
        wants_none = message.reason in (DRAINING, FULL)
        if wants_none:
            peer.task_credit = 0
            self._hungry.pop(peer.name, None)
        if record is not None and record.lease is not None and record.lease.actor == peer.name:
            self.end_lease(record, "", now, fault=not wants_none, avoid=peer.name)

    def end_lease(
        self, record: TaskRecord, reason: str, now: float, *, fault: bool = True, avoid: str = ""
    ) -> None:
        """End a lease; with a reason, the holder is told to stop."""
        assert record.lease is not None
        if reason:
            self._state.send(record.lease.actor, CancelTask(lease_id=record.lease.lease_id, reason=reason))
        self._state.record(LeaseEnded(task_id=record.task.task_id, fault=fault, avoid=avoid), now)

    # --- segments in --------------------------------------------------------------------------------------

    def segment(
        self, peer: Peer, segment: Segment, frames: Sequence[Buffer], now: float, *, trickle: bool
    ) -> None:
        """Keep a segment if it is the next of a trajectory that this actor runs; answer in any case."""
        status, reason = self._judge(peer, segment, frames, now)
        state, name = self._state, peer.name
        if status == "duplicate":
            state.ledger.duplicate_segments += 1
        elif status == "refused":
            state.ledger.refuse(reason.partition(":")[0])
        ack = SegmentAck(
            trajectory_id=segment.trajectory_id, index=segment.index, status=status, reason=reason
        )
        state.send(name, ack)
        if state.flow.is_due(name):
            self.grant(name, trickle=trickle)

    def _judge(self, peer: Peer, segment: Segment, frames: Sequence[Buffer], now: float) -> Judgement:
        state = self._state
        if not state.flow.used(peer.name, sum(map(len, frames))):
            return "refused", "no_credit: far more segments were sent than granted"
        record = state.tasks.get(segment.task_id)
        if record is None or segment.trajectory_id != record.trajectory_id:
            return self._judge_other(segment, record)
        if record.lease is None or record.lease.actor != peer.name:
            return (
                "refused",
                f"not_leased: attempt {record.attempt} of this task is not leased to {peer.name}",
            )
        trajectory = state.assembly.trajectories.get(segment.trajectory_id)
        expected, offset = (trajectory.next_index, trajectory.tokens) if trajectory else (0, 0)
        if segment.index < expected:
            return "duplicate", ""
        if segment.index > expected:
            # What is missing was lost on the way, and the actor ends the episode at this answer.
            self.end_lease(record, f"gap: segment {expected} did not arrive", now)
            return "refused", f"gap: expected segment {expected}, got {segment.index}"
        header, body = bytes(frames[0]), frames[1] if len(frames) > 1 else b""
        wrong = why_invalid(segment, record.task, offset, body) if len(frames) <= 2 else "two body frames"
        if wrong:
            self.end_lease(record, f"invalid: {wrong}", now)
            return "refused", f"invalid: {wrong}"
        state.store_segment(segment, header, body, now)
        return "stored", ""

    def _judge_other(self, segment: Segment, record: TaskRecord | None) -> Judgement:
        """Of a segment that is not of the attempt under way."""
        attempt, task_id = names.attempt_of(segment.trajectory_id), segment.task_id
        if attempt < 0 or names.task_of(segment.trajectory_id) != task_id:
            return "refused", f"invalid: trajectory id must be {task_id}.<attempt>"
        if record is not None and attempt > record.attempt:
            return "refused", f"not_leased: attempt {attempt} of this task is not leased to anybody"
        if record is not None:
            return "refused", f"superseded: attempt {record.attempt} is under way"
        final = self._state.tasks.over.get(task_id)
        if final == attempt:
            return "duplicate", ""
        if final is None:
            return "refused", "unknown_task: this broker has not leased it; was it restarted?"
        return "refused", "superseded: the task is over"

    # --- credit and time ----------------------------------------------------------------------------------

    def grant(self, actor: str, *, trickle: bool) -> None:
        """Grant segment credit, as far as the bounds allow; none while the store is low."""
        store = self._state.store
        if not self._state.flow.is_due(actor) or store.low:
            return
        due = self._state.flow.grant(actor, held=len(store), nbytes=store.nbytes, trickle=trickle)
        if due:
            self._state.send(actor, SegmentCredit(segments=due))

    def grant_short(self, *, trickle: bool) -> None:
        """Space has become free: credit for those who could not be given all that was due."""
        for name in self._state.flow.take_short():
            self.grant(name, trickle=trickle)

    def sweep(self, elapsed: float, now: float, *, trickle: bool) -> None:
        """Credit again for those who wait; end leases without progress."""
        tasks, waiting = self._state.tasks, set[str]()
        for peer in self._state.peers.of("actor"):
            self.grant(peer.name, trickle=trickle)
            if self._state.flow.credit(peer.name) == 0:  # it waits for us
                waiting.add(peer.name)
        if waiting:
            tasks.hold(waiting, elapsed, now)
        for record, reason in tasks.expired(self._grew_at, now):
            self.end_lease(record, reason, now)
        for record, lease in tasks.leases():
            if self._state.peers.get(lease.actor) is None and now - lease.renewed > self._absent_s:
                self.end_lease(record, "", now)

    def _grew_at(self, actor: str) -> float:
        peer = self._state.peers.get(actor)
        return peer.grew_at if peer is not None else 0.0
