"""The broker's sides towards actors and generators. Pure.

Towards actors: leases out, segments in, credit, and counts of their episodes. Towards generators: who they are, which
actors they admit, which weights they load.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from broker.core.peers import INFO_BYTES, Peer, Peers
from broker.core.records import Leased, LeaseEnded, TaskRecord
from broker.core.relays import WeightsAnnouncer
from broker.core.state import BrokerState
from broker.core.subsets import SIZE, Subsets
from broker.core.tasks import why_invalid
from protocol import names
from protocol.codec import Buffer
from protocol.failures import FailureCounts, failure_or_text
from protocol.messages.episodes import (
    CancelTask,
    Failure,
    LeaseTask,
    Segment,
    SegmentAck,
    SegmentCredit,
    TaskRejected,
)
from protocol.messages.peers import ActorKeys, GeneratorInfo, Generators
from protocol.session import MISSED_BEATS

MAX_BYTES_S = 64e6
"""Upper limit of the bytes per second that lists of generators take, for all actors together."""


BEHIND_S = 5.0
"""Time that a generator must have been beyond the lag bound before actors are told. It may be loading a version."""


class GeneratorList:
    """Says when which actors need a new list of generators.

    Up to `broker.core.subsets.SIZE` generators each actor gets all of them, and beyond that its own subset. A change
    is due at once, unless lists left a moment ago. Then all changes of that moment leave as one list. The moment is as
    long as the last lists took at `MAX_BYTES_S`. So the cost does not grow with the number of changes, and in a small
    fleet nobody waits. A new policy version of a generator is no change, unless it comes to lie beyond the bound, or
    within it again.

    Args:
        peers: registry of the connected peers.
        stall_s: least time for which a generator may make no step.
        lag: returns by how many versions a generator is behind the bound; 0 or less if it is within it.

    Example:
        >>> from protocol.messages.peers import Hello
        >>> peers = Peers(); known = GeneratorList(peers, stall_s=8.0)
        >>> known.actor_joined("a", host="")
        []
        >>> for name in ("g0", "g1"):
        ...     hello = Hello(role="generator", peer=name, incarnation=1, endpoint="tcp://10.0.0.1:1")
        ...     known.look_at(peers.add(hello, now=0.0), now=0.0)
        >>> [(actors, [info.peer for info in infos]) for actors, infos in known.take_due(now=0.0)]
        [(['a'], ['g0', 'g1'])]
        >>> known.take_due(now=0.0)
        []
    """

    def __init__(self, peers: Peers, stall_s: float, lag: Callable[[Peer], int] = lambda peer: 0) -> None:
        self._peers, self._stall_s, self._lag = peers, stall_s, lag
        self.offered: dict[str, GeneratorInfo] = {}
        """Healthy generators at the last list, by name."""
        self._seen: dict[str, tuple[str, str, bool]] = {}
        """Endpoints and keys of the healthy generators at the last list, and whether they were beyond the bound."""
        self._behind_since: dict[str, float] = {}
        """Generators beyond the lag bound, and since when."""
        self._actors: dict[str, str] = {}
        """Hosts of the connected actors, by name."""
        self._subsets: Subsets | None = None
        """Subsets of the actors; None while each has all generators."""
        self.unused = 0
        """Generators that are in no list, because one message to an actor does not hold more."""
        self.is_changed = False
        """True if a generator has joined, left, moved, got another key, stalled, recovered, or crossed the bound."""
        self._not_before = 0.0

    def look_at(self, generator: Peer, now: float) -> None:
        """Look at one generator, which may have changed. The cost is constant."""
        name, hello = generator.name, generator.hello
        if self._lag(generator) > 0:
            self._behind_since.setdefault(name, now)
        else:
            self._behind_since.pop(name, None)
        serves = generator.may_serve(now, self._stall_s)
        seen = (hello.endpoint, hello.public_key, self._is_behind(name, now)) if serves else None
        if self._seen.get(name) != seen:
            self.is_changed = True

    def note_gone(self, name: str) -> None:
        """Note that a generator is not connected any more."""
        self._behind_since.pop(name, None)
        self.is_changed = self.is_changed or name in self._seen

    def actor_joined(self, name: str, host: str) -> list[GeneratorInfo]:
        """Note an actor that has joined, or joined again. Return its list."""
        if self._actors.get(name) != host:
            self.actor_left(name)
            self._actors[name] = host
            if self._subsets is not None:
                self._subsets.add_actor(name, host)
                # It may have become a home of generators in place of other actors.
                self.is_changed = True
        infos = self._list_of(name)
        if self._subsets is not None:
            self._subsets.told(name)
        return infos

    def actor_left(self, name: str) -> None:
        """Note that an actor is not connected any more."""
        if self._actors.pop(name, None) is not None and self._subsets is not None:
            self._subsets.remove_actor(name)
            self.is_changed = True

    def take_due(self, *, now: float) -> list[tuple[list[str], list[GeneratorInfo]]]:
        """Return the lists that are due now, each with the actors that get it.

        Args:
            now: monotonic seconds.
        """
        if not self.is_changed or now < self._not_before:
            return []
        healthy = self._peers.healthy_generators(now, self._stall_s)
        # Who evaluates keeps a version on purpose.
        behind = {info.peer for info in healthy if not info.evaluates and self._is_behind(info.peer, now)}
        self._seen = {info.peer: (info.endpoint, info.public_key, info.peer in behind) for info in healthy}
        # Where all are beyond the bound, none is worse than the others.
        marked = behind if len(behind) < len(healthy) else set()
        offered = {info.peer: replace(info, behind=info.peer in marked) for info in healthy}
        altered = {
            name
            for name, info in offered.items()
            if name not in self.offered or _unversioned(info) != _unversioned(self.offered[name])
        }
        gone = self.offered.keys() - offered.keys()
        everybody = _evaluators(self.offered) != _evaluators(offered)
        self.is_changed, self.offered = False, offered
        lists = self._lists(altered, gone, everybody=everybody)
        self._not_before = now + sum(len(actors) * _nbytes(infos) for actors, infos in lists) / MAX_BYTES_S
        return lists

    def _lists(
        self, altered: set[str], gone: Set[str], *, everybody: bool
    ) -> list[tuple[list[str], list[GeneratorInfo]]]:
        """Return the new lists after these generators have come or changed, and those are gone.

        Args:
            everybody: whether a generator that all actors have is among them.
        """
        before = self._subsets
        self._follow(altered, gone)
        if self._subsets is None:
            self.unused = len(self.offered) - len(self._list_of("")) if self._actors else 0
            changed = bool(altered or gone or before is not None) and bool(self._actors)
            return [(list(self._actors), self._list_of(""))] if changed else []
        due = self._subsets.take_changed() if before is not None else set(self._actors)
        due |= {actor for actor in self._actors if altered.intersection(self._subsets.of(actor))}
        if everybody:
            due = set(self._actors)
        lists = [([actor], self._list_of(actor)) for actor in self._actors if actor in due]
        cut = any(len(infos) < len(self._subsets.of(actor)) for (actor,), infos in lists)
        if cut or self.unused:
            listed = {info.peer for actor in self._actors for info in self._list_of(actor)}
            self.unused = len(self.offered.keys() - listed) if self._actors else 0
        return lists

    def _follow(self, altered: set[str], gone: Set[str]) -> None:
        """Bring the subsets up to date, if there are so many generators that actors need subsets."""
        if len(self.offered) <= SIZE:
            self._subsets = None
        elif self._subsets is None:
            self._subsets = Subsets()
            for name in self.offered:
                if not self._evaluates(name):
                    self._subsets.add_generator(name, self._host_of(name))
            for actor, host in self._actors.items():
                self._subsets.add_actor(actor, host)
            self._subsets.take_changed()
        else:
            for name in gone:
                if name in self._subsets:
                    self._subsets.remove_generator(name)
            for name in altered:
                if name not in self._subsets and not self._evaluates(name):
                    self._subsets.add_generator(name, self._host_of(name))

    def _host_of(self, generator: str) -> str:
        peer = self._peers.get(generator)
        return peer.hello.host if peer is not None else ""

    def _list_of(self, actor: str) -> list[GeneratorInfo]:
        """Return the list of an actor, as far as one message holds it."""
        if self._subsets is None:
            return self._peers.fitting(list(self.offered.values()))
        # Every actor needs those that evaluate, which are few.
        evaluators = [info for info in self.offered.values() if info.evaluates]
        chosen = (self.offered.get(name) for name in self._subsets.of(actor))
        return self._peers.fitting([*evaluators, *(info for info in chosen if info is not None)])

    def _evaluates(self, name: str) -> bool:
        return name in self.offered and self.offered[name].evaluates

    def _is_behind(self, name: str, now: float) -> bool:
        return now - self._behind_since.get(name, now) >= BEHIND_S


def _evaluators(offered: Mapping[str, GeneratorInfo]) -> list[GeneratorInfo]:
    """Return the generators that only evaluate, without their versions."""
    return [_unversioned(info) for info in offered.values() if info.evaluates]


def _nbytes(infos: Sequence[GeneratorInfo]) -> int:
    return sum(INFO_BYTES + len(info.peer) + len(info.endpoint) for info in infos)


def _unversioned(info: GeneratorInfo) -> GeneratorInfo:
    return replace(info, policy_version=0)


class GeneratorSide:
    """The live generators, as the broker shows them to actors."""

    def __init__(self, state: BrokerState, announcer: WeightsAnnouncer) -> None:
        self._state, self._announcer = state, announcer
        self._list = GeneratorList(state.peers, state.config.generator_stall_s, self._beyond_bound)
        self._actor_keys: list[str] | None = None
        """Public keys of actors that generators are to admit; None without encryption."""

    @property
    def offered(self) -> list[str]:
        """Names of the generators that actors may use."""
        return list(self._list.offered)

    @property
    def unused(self) -> int:
        """Generators that no actor was told of."""
        return self._list.unused

    def _beyond_bound(self, peer: Peer) -> int:
        """Return by how many versions a generator is beyond the lag bound; 0 or less if it is within it."""
        newest = self._state.published
        if newest is None or not peer.has_beaten:
            return 0
        lag = self._state.line.lag(peer.heartbeat.policy_version, newest.version)
        return lag - self._state.max_policy_lag

    def actor_joined(self, peer: Peer) -> None:
        """Send an actor that has joined its list of generators."""
        infos = self._list.actor_joined(peer.name, peer.hello.host)
        self._state.outbox.send(peer.name, Generators(generators=infos))

    def actor_left(self, name: str) -> None:
        """Note that an actor is not connected any more."""
        self._list.actor_left(name)

    def joined(self, peer: Peer, now: float) -> None:
        """Tell a generator what it needs, after its Welcome."""
        self._tell_actor_keys(peer)
        self.look_at(peer, now)
        self._announcer.joined(peer)

    def look_at(self, peer: Peer, now: float) -> None:
        """Look at one generator, which may have stalled or recovered. Call it at intervals, too."""
        self._list.look_at(peer, now)

    def beat(self, peer: Peer, now: float) -> None:
        """Handle the heartbeat of a generator, which says what version it serves."""
        self.look_at(peer, now)
        self._announcer.beat(peer, now)

    def left(self, peer: Peer) -> None:
        """Note that a generator is not connected any more."""
        self._list.note_gone(peer.name)
        self._announcer.note_gone(peer)

    def admit(self, actor_keys: Sequence[str]) -> None:
        """Note the public keys (Z85) of the actors that are admitted now; tell generators if they have changed."""
        if actor_keys != self._actor_keys:
            self._actor_keys = list(actor_keys)
            for generator in self._state.peers.of("generator"):
                self._tell_actor_keys(generator)

    def _tell_actor_keys(self, generator: Peer) -> None:
        if self._actor_keys is not None:
            self._state.outbox.send(generator.name, ActorKeys(public_keys=self._actor_keys))

    def offer(self, now: float) -> None:
        """Send the lists of generators that are due, each to its actors."""
        for actors, infos in self._list.take_due(now=now):
            # One message for all that get the same list, so that it is encoded once.
            generators = Generators(generators=infos)
            for actor in actors:
                self._state.outbox.send(actor, generators)


RECENT = 256
"""Number of episodes that ended last, of which `/status` says how many failed."""


@dataclass
class EpisodeCounts:
    """Outcomes of the episodes of all actors.

    Example:
        >>> counts = EpisodeCounts()
        >>> counts.interrupted(Failure(message="no generator", fault=False))
        >>> counts.page()["interrupted"], counts.page()["interrupted_why"]
        (1, 'no generator')
    """

    _failed: FailureCounts = field(default_factory=FailureCounts)
    _interruptions: FailureCounts = field(default_factory=FailureCounts)
    ended: int = 0
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    """True if each of the episodes that ended last has failed."""

    def closed(self, segment: Segment) -> None:
        """Count an episode by its closing segment."""
        failed = segment.status == "failed"
        self.ended += 1
        self._recent.append(failed)
        if failed:
            self._failed.add(failure_or_text(segment.failure, segment.error))

    def interrupted(self, failure: Failure) -> None:
        """Count an attempt that an actor rejects because of an error. Its task runs again."""
        self._interruptions.add(failure)

    def page(self) -> dict[str, Any]:
        """Return the section ``episodes`` of `/status`."""
        return {
            "ended": self.ended,
            "failed": self._failed.total,
            "recent": len(self._recent),
            "recent_failed": sum(self._recent),
            "why": self._failed.sentence(),
            "failures": self._failed.rows(),
            "interrupted": self._interruptions.total,
            "interrupted_why": self._interruptions.sentence(),
        }


Judgement = tuple[Literal["stored", "duplicate", "refused"], str]
"""Status and reason in the answer to a segment."""
DRAINING = "draining"
FULL = "full"
MAX_CREDIT = 1 << 20
MAX_FREE_ATTEMPTS = 20
"""Attempts of a task after which each lost one counts, whoever is at fault."""
OTHERS_FIRST_S = 10.0
"""Time for which a task that an actor rejected is kept for other actors. They may take no tasks at all."""
ABSENT_BEATS = 3 * MISSED_BEATS
"""Heartbeats that an actor has to come back for its leases after a restart of the broker."""


class ActorSide:
    """Leases of tasks to actors, and the segments that come back."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._absent_s = ABSENT_BEATS * state.config.heartbeat_s
        self._hungry: OrderedDict[str, Peer] = OrderedDict()
        """Actors with task credit; the first one gets the next task."""
        self.episodes = EpisodeCounts()

    @property
    def hungry(self) -> bool:
        """Whether some task is queued and some actor has task credit."""
        return bool(self._hungry) and self._state.tasks.waiting

    # --- joining and leaving ------------------------------------------------------------------------------

    def tell_leases(self, peer: Peer, now: float) -> None:
        """Repeat the leases of this process, which may have been lost; end the leases of an earlier process.

        Call it before the Welcome, so that the task credit that the actor announces then counts these leases
        in.
        """
        for record in reversed(self._state.tasks.held_by(peer.name)):
            assert record.lease is not None
            if record.lease.incarnation == peer.hello.incarnation:
                self._tell(record)
            else:
                self.end_lease(record, "", now)

    def joined(self, peer: Peer, *, trickle: bool) -> None:
        """Start the credit of an actor from zero, as the actor does with every Hello."""
        self._hungry.pop(peer.name, None)
        self._state.flow.join(peer.name)
        self.grant(peer.name, trickle=trickle)

    def left(self, peer: Peer, now: float, *, fault: bool) -> None:
        """End the actor's leases; its tasks return to the front of the queue, in their old order."""
        self._hungry.pop(peer.name, None)
        self._state.flow.leave(peer.name)
        for record in reversed(self._state.tasks.held_by(peer.name)):
            self.end_lease(record, "", now, fault=fault)

    def credited(self, peer: Peer, tasks: int, *, void: bool = False) -> None:
        """Add task credit: the actor can run more tasks. ``void``: its unused credit is void."""
        if void:
            self._wants_none(peer)
        peer.task_credit = min(MAX_CREDIT, peer.task_credit + tasks)
        if peer.task_credit:
            self._hungry[peer.name] = peer

    def _wants_none(self, peer: Peer) -> None:
        peer.task_credit = 0
        self._hungry.pop(peer.name, None)

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
        self._state.outbox.send(record.lease.actor, lease)

    def _choose(self, record: TaskRecord, now: float) -> Peer | None:
        """Return the next actor in turn. One that rejected this task gets it later than others."""
        for name, peer in self._hungry.items():
            if name == record.avoid:
                others_s = OTHERS_FIRST_S if len(self._state.peers.of("actor")) > 1 else 0.0
                if now < record.retry_at + others_s:
                    continue
            peer.task_credit -= 1
            if peer.task_credit:
                self._hungry.move_to_end(name)
            else:
                del self._hungry[name]
            return peer
        return None

    def rejected(self, peer: Peer, message: TaskRejected, now: float) -> None:
        """End the lease of a task that an actor rejects; "draining" or "full" means that it wants no task.

        The attempt counts as lost only if the actor says that the environment or the model failed it.
        """
        record = self._state.tasks.by_lease(message.lease_id)
        wants_none = message.reason in (DRAINING, FULL)
        if wants_none:
            self._wants_none(peer)
        if record is not None and record.lease is not None and record.lease.actor == peer.name:
            if message.failure is not None:
                self.episodes.interrupted(message.failure)
            # An actor that wants none may take this task later: nothing is wrong with the task.
            avoid = "" if wants_none else peer.name
            # A task whose prompt ends each generator would otherwise come again for ever.
            fault = message.fault or record.attempt >= MAX_FREE_ATTEMPTS
            self.end_lease(record, "", now, fault=fault and not wants_none, avoid=avoid)

    def end_lease(
        self, record: TaskRecord, reason: str, now: float, *, fault: bool = True, avoid: str = ""
    ) -> None:
        """End a lease. With a reason, the actor gets a CancelTask."""
        assert record.lease is not None
        if reason:
            self._state.outbox.send(
                record.lease.actor, CancelTask(lease_id=record.lease.lease_id, reason=reason)
            )
        self._state.record(LeaseEnded(task_id=record.task.task_id, fault=fault, avoid=avoid), now)

    # --- segments in --------------------------------------------------------------------------------------

    def segment(
        self, peer: Peer, segment: Segment, frames: Sequence[Buffer], now: float, *, trickle: bool
    ) -> None:
        """Store a segment if it is the next one of a trajectory that this actor runs; answer in any case."""
        status, reason = self._judge(peer, segment, frames, now)
        state, name = self._state, peer.name
        if status == "stored" and segment.status != "unfinished":
            self.episodes.closed(segment)
        elif status == "duplicate":
            state.ledger.duplicate_segments += 1
        elif status == "refused":
            state.ledger.refuse(reason.partition(":")[0])
        ack = SegmentAck(
            trajectory_id=segment.trajectory_id, index=segment.index, status=status, reason=reason
        )
        state.outbox.send(name, ack)
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
            # The missing segment was lost on the way. The actor ends the episode when it gets this answer.
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
        """Judge a segment that does not belong to the current attempt."""
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
        """Grant segment credit as far as the bounds allow; none while the store is low."""
        store = self._state.store
        if not self._state.flow.is_due(actor) or store.low:
            return
        due = self._state.flow.grant(actor, held=len(store), nbytes=store.nbytes, trickle=trickle)
        if due:
            self._state.outbox.send(actor, SegmentCredit(segments=due))

    def grant_short(self, *, trickle: bool) -> None:
        """Grant credit to the actors that got less than was due, because room may have become free."""
        for name in self._state.flow.take_short():
            self.grant(name, trickle=trickle)

    def sweep(self, elapsed: float, now: float, *, trickle: bool) -> None:
        """Grant credit to actors that wait; end leases without progress, or of actors that stay away."""
        tasks, waiting = self._state.tasks, set[str]()
        for peer in self._state.peers.of("actor"):
            self.grant(peer.name, trickle=trickle)
            # An actor without credit waits for the broker, so its leases must not run out.
            if self._state.flow.credit(peer.name) == 0:
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
