"""Units on their way to the learner: ready, leased, expired, committed, released. Pure."""

import heapq
from collections.abc import Iterable, Iterator

from broker.core.admission import is_stale
from broker.core.learner.released import ReleasedUnit
from broker.core.ledger import Ledger
from broker.core.records import Outcome, StoredSegment, Unit
from broker.core.store import SegmentStore
from protocol.codec import Buffer
from protocol.version_line import VersionLine


class Deliveries:
    """Whole units. Evaluation comes before training, then older units first; a unit keeps its age.

    A unit is leased until it is committed. If the lease expires before, the unit becomes ready again, but a
    late commit still counts, because it prevents a second training. A committed unit is kept until a
    checkpoint of the learner covers its step. If the learner goes back to a step before that, the unit
    becomes ready again.
    """

    def __init__(self, store: SegmentStore, ledger: Ledger, *, lease_s: float, max_policy_lag: int) -> None:
        self._store, self._ledger = store, ledger
        self._lease_s, self._max_policy_lag = lease_s, max_policy_lag
        self._order: list[tuple[bool, int]] = []
        self._ready: dict[int, Unit] = {}
        """Ready units by age."""
        self._units: dict[str, Unit] = {}
        """Units that are not committed, by id."""
        self._since: dict[str, float] = {}
        """Time when each leased unit was leased."""
        self._committed: dict[str, Unit] = {}
        self.count = 0

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def leased(self) -> int:
        return len(self._since)

    @property
    def committed(self) -> int:
        """Number of committed units that wait for a checkpoint."""
        return len(self._committed)

    @property
    def ready_segments(self) -> int:
        return sum(len(unit.segments) for unit in self._ready.values())

    @property
    def leased_segments(self) -> int:
        return sum(len(self._units[unit_id].segments) for unit_id in self._since)

    def units(self) -> list[Unit]:
        """Return all units that are not committed, in the order in which they became ready."""
        return sorted(self._units.values(), key=lambda unit: unit.age)

    def segments(self) -> Iterator[StoredSegment]:
        """Yield the segments of all units that are not committed."""
        for unit in self._units.values():
            yield from unit.segments

    def add(self, unit: Unit) -> None:
        """Add a new unit, which is ready."""
        self.count += 1
        unit.age = self.count
        # A learner may give a group the name of another group or of a trajectory.
        while self.knows(unit.unit_id):
            unit.unit_id += f"#{unit.age}"
        self._units[unit.unit_id] = unit
        self._queue(unit)

    def next(self) -> Unit | None:
        """Return the ready unit that is delivered next; None if no unit is ready."""
        # A unit may be committed or dropped while it is ready.
        while self._order and self._order[0][1] not in self._ready:
            heapq.heappop(self._order)
        return self._ready[self._order[0][1]] if self._order else None

    def is_stale(self, unit: Unit, version: int, line: VersionLine) -> bool:
        """Return whether a ready unit is too old to be delivered under this policy version of this line."""
        # The learner may hold the unit from an earlier delivery, and train it.
        # Later segments need a context unit.
        wanted = unit.held or unit.purpose == "eval" or unit.context
        return not wanted and is_stale(line.freshest(unit.version_max), version, self._max_policy_lag)

    def lease(self, unit_id: str, epoch: int) -> None:
        """Lease a ready unit to the learner of this epoch."""
        unit = self._units[unit_id]
        self._ready.pop(unit.age, None)
        self._ledger.delivered.add_all(unit.segments)
        if unit.deliveries:
            self._ledger.redelivered.add_all(unit.segments)
        if not unit.deliveries or unit.epoch != epoch:
            unit.processes += 1
        unit.deliveries += 1
        unit.epoch, unit.held = epoch, True

    def leased_at(self, unit_id: str, now: float) -> None:
        """Note the time at which the lease begins."""
        self._since[unit_id] = now

    def frames(self, unit: Unit) -> list[tuple[bytes, Buffer]]:
        """Return header and body of each segment, as the actor sent them."""
        return [self._store.get(stored.key) for stored in unit.segments]

    def knows(self, unit_id: str) -> bool:
        """Return whether the broker still has the unit, so that a commit of it has, or had, an effect."""
        return unit_id in self._units or unit_id in self._committed

    def commit(self, unit_id: str, outcome: Outcome, step: int) -> None:
        """Commit a unit, and keep it until a checkpoint covers ``step``. Ignore unknown or committed ones."""
        unit = self._units.get(unit_id)
        if unit is None:
            return
        self._remove(unit)
        self._count_lengths(unit, outcome, 1)
        unit.step, unit.outcome, unit.processes = step, outcome, 0
        self._committed[unit_id] = unit
        for stored in unit.segments:
            self._store.commit(stored.key)
        self._ledger.note_outcome(outcome, *unit.segments)

    def release(self, step: int) -> list[Unit]:
        """Release the units that were committed up to ``step``, for good. Return them."""
        units = [unit for unit in self._committed.values() if unit.step <= step]
        for unit in units:
            del self._committed[unit.unit_id]
            for stored in unit.segments:
                self._store.drop(stored.key)
        return units

    def lose(self, unit: ReleasedUnit) -> None:
        """Count a released unit as lost: the step that trained or dropped it is not part of the line any more."""
        outcomes = self._ledger.outcomes
        outcomes[unit.outcome].move(
            outcomes["lost"], segments=unit.segments, tokens=unit.tokens, action_tokens=unit.action_tokens
        )
        self._count_lengths(unit, unit.outcome, -1)

    def survived(self) -> None:
        """Reset the count of processes: the learner wrote a checkpoint, so no unit is to blame."""
        for unit in self._units.values():
            unit.processes = 0

    def uncommit_all(self) -> None:
        """Make all committed units ready again, at their old age, because no checkpoint covers them."""
        for unit in self._committed.values():
            assert unit.outcome is not None
            for stored in unit.segments:
                self._store.uncommit(stored.key)
                self._ledger.undo_outcome(unit.outcome, stored)
            self._count_lengths(unit, unit.outcome, -1)
            unit.step, unit.outcome, unit.held = 0, None, False
            self._units[unit.unit_id] = unit
            self._queue(unit)
        self._committed = {}

    def _count_lengths(self, unit: Unit | ReleasedUnit, outcome: Outcome, times: int) -> None:
        for tokens in unit.lengths if outcome == "trained" else ():
            self._ledger.lengths.trained(tokens, times)

    def drop(self, unit_id: str, outcome: Outcome) -> Unit:
        """Drop a unit that is not committed."""
        unit = self._units[unit_id]
        self._remove(unit)
        for stored in unit.segments:
            self._store.drop(stored.key)
            self._ledger.note_outcome(outcome, stored)
        return unit

    def expire(self, progress_at: float, now: float) -> None:
        """Expire the leases of units that were not committed while the learner made no progress."""
        for unit_id, since in list(self._since.items()):
            if now - max(since, progress_at) > self._lease_s:
                self._expire(unit_id)

    def expire_all(self, *, void: bool) -> None:
        """Make all leased units ready again, because they may have been lost on the way.

        ``void``: the learner that had them is gone for good, so it does not hold them any more.
        """
        self._since = {}
        for unit in self._units.values():
            unit.held = unit.held and not void
            if unit.age not in self._ready:
                self._queue(unit)

    def saved(self) -> list[Unit]:
        """Return all units, for a snapshot."""
        return [*self._units.values(), *self._committed.values()]

    def restore(self, units: Iterable[Unit], count: int) -> None:
        """Restore the units that `saved` returned; those that are not committed are ready."""
        self.count = count
        for unit in units:
            if unit.outcome is None:
                self._units[unit.unit_id] = unit
                self._queue(unit)
            else:
                self._committed[unit.unit_id] = unit

    def _queue(self, unit: Unit) -> None:
        self._ready[unit.age] = unit
        heapq.heappush(self._order, (unit.purpose != "eval", unit.age))

    def _expire(self, unit_id: str) -> None:
        del self._since[unit_id]
        self._queue(self._units[unit_id])

    def _remove(self, unit: Unit) -> None:
        del self._units[unit.unit_id]
        self._since.pop(unit.unit_id, None)
        self._ready.pop(unit.age, None)
