"""The whole state of the broker in one place. Events and segments change it; actions leave through its outbox."""

from collections.abc import Iterator

from msgspec.structs import replace

from broker.config import BrokerConfig
from broker.core.autoscaling import Advice, Counts, Look
from broker.core.fleet import Capacity
from broker.core.hosts import Hosts
from broker.core.peers import BrokerOutbox, Peers
from broker.core.records import (
    AnyEvent,
    Committed,
    Delivered,
    GroupClosed,
    LearnerJoined,
    Leased,
    LeaseEnded,
    Ledger,
    Outcome,
    Published,
    Released,
    SegmentStore,
    StoredSegment,
    TaskRecord,
    TasksPut,
    UnitDropped,
)
from broker.core.tasks import SegmentFlow, TaskQueue
from broker.core.units import Assembly, Deliveries, LearnerSteps, process_of, take_over
from broker.errors import StateBroken
from protocol.codec import Buffer
from protocol.messages.episodes import CancelTask, Dropped, Segment, Task
from protocol.messages.fields import Role
from protocol.messages.peers import Hello
from protocol.version_line import VersionLine
from protocol.wanted import Wanted, is_local

TOO_LATE = "the deadline of its group has passed"
ENDED = "the learner that asked for it is gone"


class BrokerState:
    """State that the parts of `broker.core.dispatch.Dispatcher` share.

    The lasting state (tasks, trajectories, groups, units, ledger, lineage, weights) changes only by `record`
    and `store_segment`, each of which leaves a record in the store. Peers, credit, the leases of units and
    the counts of refusals change freely; the process may lose them when it ends.
    """

    def __init__(
        self,
        config: BrokerConfig,
        store: SegmentStore,
        max_policy_lag: int,
        boot: str = "",
        ledger: Ledger | None = None,
    ) -> None:
        self.config, self.max_policy_lag = config, max_policy_lag
        self.store = store
        self.ledger = Ledger() if ledger is None else ledger
        self.peers = Peers()
        self.capacity = Capacity()
        self.advice: Advice | None = None
        """Newest advice on the numbers of generators and actors."""
        self.hosts = Hosts()
        self.flow = SegmentFlow(config)
        self.tasks = TaskQueue(
            self.ledger,
            lease_s=config.task_lease_s,
            max_attempts=config.max_attempts,
            max_queued=config.max_queued_tasks,
            boot=boot,
        )
        self.assembly = Assembly(
            store, self.ledger, min_members=config.min_group_members, deadline_s=config.group_deadline_s
        )
        self.deliveries = Deliveries(
            store, self.ledger, lease_s=config.delivery_lease_s, max_policy_lag=max_policy_lag
        )
        self.lineage: Hello | None = None
        """Hello of the newest learner, kept while it is away."""
        self.steps = LearnerSteps()
        """Steps of the newest learner's line of checkpoints."""
        self.published: Published | None = None
        """Newest policy version that was published."""
        self.line = VersionLine()
        """Version line of the published weights."""
        self.notices: list[Dropped] = []
        """Notices for the learner; `take_notices` empties the list."""
        self.outbox = BrokerOutbox(self.ledger)

    # --- lasting state ------------------------------------------------------------------------------------

    def record(self, event: AnyEvent, now: float) -> list[str]:
        """Apply an event and record it; return texts of what was wrong with it, for the peer that caused it.

        Raises:
            StateBroken: the event could not be applied or recorded. The journal is right, the state is not.
        """
        wrong = self.apply(event, now)
        try:
            self.store.record_event(event)
        except Exception as error:
            # The state is ahead of the journal.
            raise _broken(repr(event), error) from error
        return wrong

    def store_segment(self, segment: Segment, header: bytes, body: Buffer, now: float) -> None:
        """Record the next segment of a leased task, and apply it.

        Raises:
            StateBroken: the segment could not be recorded or applied, see `record`.
        """
        key = (segment.trajectory_id, segment.index)
        try:
            self.store.put(key, header, body)
        except Exception as error:
            # The journal may have the segment, but the state does not.
            raise _broken(f"segment {key}", error) from error
        self.apply_segment(segment, len(header) + len(body), now)

    def apply(self, event: AnyEvent, now: float) -> list[str]:
        """Apply an event without recording it; return texts of what was wrong with it.

        Raises:
            StateBroken: the event could not be applied.
        """
        try:
            wrong = self._apply(event, now)
            if self.assembly.results:
                self._take_results()
        except Exception as error:
            raise _broken(repr(event), error) from error
        return wrong

    def apply_segment(self, segment: Segment, nbytes: int, now: float) -> None:
        """Apply a segment that the store has already.

        Raises:
            StateBroken: the segment could not be applied.
        """
        try:
            record = self._record(segment.task_id)
            assert record.lease is not None
            record.lease.renewed = now
            if segment.status != "unfinished":
                self.tasks.close(record)
            self.assembly.add(segment, record.task, nbytes, now)
            if self.assembly.results:
                self._take_results()
        except Exception as error:
            raise _broken(f"segment {(segment.trajectory_id, segment.index)}", error) from error

    def _apply(self, event: AnyEvent, now: float) -> list[str]:
        # The most frequent events come first.
        match event:
            case Leased():
                self.tasks.lease(event.task_id, event.lease_id, event.actor, event.incarnation, now)
            case TasksPut(tasks=tasks):
                return [wrong for task in tasks if (wrong := self._put_task(task))]
            case LeaseEnded(task_id=task_id, fault=fault, avoid=avoid):
                record = self._record(task_id)
                self.assembly.drop_trajectory(record.trajectory_id, "superseded")
                if not self.tasks.end_lease(record, now, fault=fault, avoid=avoid):
                    self.assembly.give_up(record.task, now)
            case GroupClosed(group_id=group_id):
                self.assembly.close_group(group_id)
            case Delivered(unit_id=unit_id, epoch=epoch):
                self.deliveries.lease(unit_id, epoch)
            case UnitDropped(unit_id=unit_id, outcome=outcome):
                self._drop_unit(unit_id, outcome)
            case Committed():
                self._commit(event)
            case Released(step=step):
                self.steps.note_release(self.deliveries.release(step), step)
                self.deliveries.survived()
            case LearnerJoined(hello=hello):
                self._join(hello, now)
            case Published():
                self.now_published(event)
        return []

    def now_published(self, event: Published) -> None:
        """Set the newest policy version, and the version line of its weights."""
        # The wall clock is the journal's alone, so a recovered state equals the one before.
        self.published, self.line = replace(event, at=None), VersionLine(event.line)

    def _put_task(self, task: Task) -> str:
        wrong = self.assembly.expect(task)
        if not wrong:
            self.tasks.put(task)
        return wrong

    def _record(self, task_id: str) -> TaskRecord:
        record = self.tasks.get(task_id)
        assert record is not None, f"task {task_id} is over"
        return record

    def _drop_unit(self, unit_id: str, outcome: Outcome) -> None:
        unit = self.deliveries.drop(unit_id, outcome)
        self.notices.append(
            Dropped(
                unit_id=unit.unit_id, group_id=unit.group_id, trajectories=unit.trajectories, reason=outcome
            )
        )

    def _commit(self, event: Committed) -> None:
        outcomes: tuple[tuple[Outcome, list[str]], ...] = (
            ("trained", event.trained),
            ("dropped", event.dropped),
        )
        for outcome, unit_ids in outcomes:
            for unit_id in unit_ids:
                if not self.deliveries.knows(unit_id):
                    self.ledger.refuse("unknown_unit")
                self.deliveries.commit(unit_id, outcome, event.step)
        self.steps.note_commit(event.step)
        self.ledger.replayed_tokens += event.replayed_tokens

    def _join(self, hello: Hello, now: float) -> None:
        """Let a learner take over, see `take_over`."""
        before, self.lineage = self.lineage, hello
        if before is None:
            self.steps.begin(hello.step, new_line=True)
        elif process_of(before) != process_of(hello):
            self._cancel_all(*take_over(self.deliveries, self.steps, before, hello))
            self.steps.begin(hello.step, new_line=before.lineage != hello.lineage)
        self.assembly.set_mode(hello.deliver, now)

    def _cancel_all(self, *purposes: str) -> None:
        """Cancel all tasks of these purposes, and drop their trajectories and units."""
        for record in self.tasks.live():
            if record.task.purpose in purposes:
                self._cancel(record, "superseded", ENDED)
        if "train" in purposes:
            self.assembly.drop_all()
        self._take_results()
        for unit in self.deliveries.units():
            if unit.purpose in purposes:
                self.deliveries.drop(unit.unit_id, "superseded")

    def _take_results(self) -> None:
        """Queue the units that an event made ready, and cancel the tasks that it made unwanted."""
        for unit in self.assembly.take_ready():
            self.deliveries.add(unit)
        for task_id in self.assembly.take_unwanted():
            record = self.tasks.get(task_id)
            if record is not None:
                self._cancel(record, "late", TOO_LATE)
        self.notices += self.assembly.take_dropped()

    def _cancel(self, record: TaskRecord, outcome: Outcome, reason: str) -> None:
        if record.lease is not None:
            self.outbox.send(record.lease.actor, CancelTask(lease_id=record.lease.lease_id, reason=reason))
        self.assembly.drop_trajectory(record.trajectory_id, outcome)
        self.tasks.cancel(record)
        self.ledger.task("cancelled")

    # --- views --------------------------------------------------------------------------------------------

    def segments(self) -> Iterator[StoredSegment]:
        """Yield all segments that have no outcome yet."""
        yield from self.assembly.segments()
        yield from self.deliveries.segments()

    def miscount(self) -> str:
        """Return by how many segments store and ledger differ, or "". The cost is constant."""
        return self.ledger.miscount(len(self.store))

    def violation(self) -> str:
        """Return by how much the ledger fails to close, or "". Walks over everything that is held."""
        return self.miscount() or self.ledger.difference(self.segments())

    def room(self) -> int:
        """Return the segment credit that may still be granted to actors."""
        return 0 if self.store.low else self.flow.room(len(self.store), self.store.nbytes)

    def full(self) -> bool:
        """Return whether what is held has reached a limit."""
        if self.store.low:
            return True
        return self.flow.room(len(self.store), self.store.nbytes) + self.flow.outstanding <= 0

    def take_notices(self) -> list[Dropped]:
        """Return the notices for the learner since the last call."""
        notices, self.notices = self.notices, []
        return notices


def _broken(what: str, error: Exception) -> StateBroken:
    return StateBroken(f"{what} could not be applied: {error!r}")


def advised(advice: Advice | None) -> dict[str, float]:
    """Return the gauges of an advice; nothing if nothing was measured."""
    if advice is None or not advice.measured:
        return {}
    counts = advice.counts
    return {
        "fleet/wanted_generators": float(counts.generators),
        "fleet/wanted_actors": float(counts.actors),
    }


def look_of(state: BrokerState, now: float) -> Look:
    """Return what is to be known of this moment for an advice."""
    newest = state.published.version if state.published else 0
    generators = [peer for peer in state.peers.of("generator") if not peer.asked_to_leave]
    actors = [peer for peer in state.peers.of("actor") if not peer.asked_to_leave]
    learner = next(iter(state.peers.of("learner")), None)
    told = {} if learner is None else learner.heartbeat.gauges
    outcomes = state.ledger.outcomes
    return Look(
        at=now,
        generators=len(generators),
        actors=len(actors),
        trained_tokens=told.get("trained_tokens_total"),
        busy_s=told.get("busy_seconds_total", 0.0),
        idle_s=told.get("idle_seconds_total", 0.0),
        sampled_tokens=state.peers.total("generator", "tokens_total"),
        serving_s=state.peers.total("generator", "serving_seconds_total"),
        unused_s=state.peers.total("generator", "idle_seconds_total"),
        kept_tokens=float(outcomes["trained"].action_tokens),
        dropped_tokens=float(
            sum(tally.action_tokens for name, tally in outcomes.items() if name != "trained")
        ),
        tasks_waiting=bool(state.tasks.queued),
        fetching=any(peer.has_beaten and peer.heartbeat.policy_version < newest for peer in generators),
    )


def wanted_counts(look: Look, state: BrokerState, wanted: Wanted) -> Counts:
    """Return the numbers that are wanted now: those beside the learner that the user said, and those of other hosts."""
    counts = []
    roles: tuple[tuple[Role, int | None, int], ...] = (
        ("generator", wanted.generators, look.generators),
        ("actor", wanted.actors, look.actors),
    )
    for role, said, there in roles:
        here = sum(is_local(p.name) and not p.asked_to_leave for p in state.peers.of(role))
        counts.append(there if said is None else there - here + said)
    return Counts(*counts)


def gauges_of(state: BrokerState) -> dict[str, float]:
    """Return the broker's gauges, and the merged gauges of generators and actors."""
    return {
        **state.peers.gauges(),
        **state.capacity.gauges(),
        **advised(state.advice),
        **state.hosts.gauges(state.peers, state.published.version if state.published else 0),
        "broker/generators": float(len(state.peers.of("generator"))),
        "broker/actors": float(len(state.peers.of("actor"))),
        "broker/queue_depth_segments": float(len(state.store)),
        "broker/queued_bytes": float(state.store.nbytes),
        "broker/tasks_queued": float(state.tasks.queued),
        "broker/tasks_leased": float(state.tasks.leased),
        "broker/units_ready": float(state.deliveries.ready),
        "broker/units_leased": float(state.deliveries.leased),
        "broker/units_committed": float(state.deliveries.committed),
        "broker/journal_aside_bytes": float(state.store.committed_nbytes),
        "broker/length_bias_tokens": state.ledger.lengths.bias_tokens,
        "broker/length_distance_tokens": state.ledger.lengths.distance_tokens,
        "broker/ledger_stored_tokens": float(state.ledger.stored.tokens),
        "broker/ledger_held_tokens": float(state.ledger.held_tokens),
        "broker/ledger_rolled_back_tokens": float(state.ledger.rolled_back.tokens),
        **{
            f"broker/ledger_{outcome}_tokens": float(tally.tokens)
            for outcome, tally in state.ledger.outcomes.items()
        },
    }
