"""Units on their way to the learner: ready, leased, committed, returned. Pure."""

import heapq
from collections.abc import Sequence

from broker.admission import is_stale
from broker.ledger import Ledger, Outcome
from broker.store import SegmentStore
from broker.units import Unit
from protocol.messages import Dropped


class Deliveries:
    """Units that are whole. Oldest first, evaluation before training; a returned unit keeps its age.

    A unit is held until it is committed. Several leases may have been given for it one after the other;
    within one learner epoch a commit of any of them counts, so that a late one prevents a second training.
    Lease ids contain ``boot``, so that those of a broker before this one are not taken for ours.
    """

    def __init__(
        self, store: SegmentStore, ledger: Ledger, *, lease_s: float, max_policy_lag: int, boot: str = ""
    ) -> None:
        self._store, self._ledger, self._boot = store, ledger, boot
        self._lease_s, self._max_policy_lag = lease_s, max_policy_lag
        self._order: list[tuple[bool, int]] = []
        self._ready: dict[int, Unit] = {}
        """By age."""
        self._units: dict[str, Unit] = {}
        """By lease, ended leases included."""
        self._live: dict[str, tuple[Unit, float]] = {}
        """By lease: unit and when it was leased."""
        self._count = 0
        self._leases = 0

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def leased(self) -> int:
        return len(self._live)

    @property
    def ready_segments(self) -> int:
        return sum(len(unit.pieces) for unit in self._ready.values())

    @property
    def leased_segments(self) -> int:
        return sum(len(unit.pieces) for unit, _ in self._live.values())

    def units(self) -> list[Unit]:
        """All units that are not committed, ready ones first."""
        return [*self._ready.values(), *(unit for unit, _ in self._live.values())]

    def oldest_lease(self) -> float | None:
        """When the oldest live lease was given."""
        return min((since for _, since in self._live.values()), default=None)

    def add(self, unit: Unit) -> None:
        """A new unit is ready."""
        self._count += 1
        unit.age = self._count
        self._queue(unit)

    def take(self, version: int) -> tuple[Unit | None, list[Dropped]]:
        """The oldest ready unit that is fresh enough, and those dropped on the way to it as too stale."""
        stale: list[Dropped] = []
        while self._order:
            _, age = heapq.heappop(self._order)
            unit = self._ready.pop(age, None)
            if unit is None:  # committed by an ended lease while it was ready again
                continue
            # A lease that counts still: the learner may hold the unit, and train it. Context: what follows needs it.
            wanted = bool(unit.lease_ids) or unit.purpose == "eval" or unit.context
            if wanted or not is_stale(unit.version_max, version, self._max_policy_lag):
                return unit, stale
            self._remove(unit, "stale")
            stale.append(
                Dropped(
                    unit_id=unit.unit_id,
                    group_id=unit.group_id,
                    trajectories=unit.trajectories,
                    reason="stale",
                )
            )
        return None, stale

    def lease(self, unit: Unit, now: float) -> str:
        """Lease a unit that `take` gave; returns the lease's id."""
        self._leases += 1
        lease_id = f"d{self._boot}.{self._leases}"
        unit.lease_ids.append(lease_id)
        self._units[lease_id] = unit
        self._live[lease_id] = (unit, now)
        for piece in unit.pieces:
            self._ledger.delivered.add(piece)
            if unit.redelivered:
                self._ledger.redelivered.add(piece)
        return lease_id

    def frames(self, unit: Unit) -> list[tuple[bytes, bytes]]:
        """Header and body of each segment, as they came."""
        return [self._store.get(piece.key) for piece in unit.pieces]

    def commit(self, lease_ids: Sequence[str], outcome: Outcome) -> list[str]:
        """Let units go; returns lease ids that are unknown (committed before, or of another epoch)."""
        unknown = []
        for lease_id in lease_ids:
            unit = self._units.get(lease_id)
            if unit is None:
                unknown.append(lease_id)
            else:
                self._remove(unit, outcome)
        return unknown

    def expire(self, progress_at: float, now: float) -> int:
        """Return leases that were not committed while the learner made no progress; how many."""
        ended = [
            lease_id for lease_id, (_, since) in self._live.items()
            if now - max(since, progress_at) > self._lease_s
        ]  # fmt: skip
        for lease_id in ended:
            self._return(lease_id)
        return len(ended)

    def return_live(self) -> int:
        """What is leased may have been lost on the way: it is ready again, its leases still count; how many."""
        live = list(self._live)
        for lease_id in live:
            self._return(lease_id)
        return len(live)

    def return_all(self) -> int:
        """The learner is gone: everything is ready again, and its leases are void; how many."""
        returned = self.return_live()
        for unit in self._units.values():
            unit.lease_ids = []
        self._units = {}
        return returned

    def _queue(self, unit: Unit) -> None:
        self._ready[unit.age] = unit
        heapq.heappush(self._order, (unit.purpose != "eval", unit.age))

    def _return(self, lease_id: str) -> None:
        unit, _ = self._live.pop(lease_id)
        unit.redelivered = True
        self._queue(unit)

    def _remove(self, unit: Unit, outcome: Outcome) -> None:
        for lease_id in unit.lease_ids:
            self._units.pop(lease_id, None)
            self._live.pop(lease_id, None)
        self._ready.pop(unit.age, None)
        for piece in unit.pieces:
            self._store.drop(piece.key)
            self._ledger.settle(outcome, piece)
