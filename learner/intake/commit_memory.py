"""Memory of the units that this lineage of checkpoints has committed. Pure."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

REMEMBERED_UNITS = 65_536
"""Number of committed units that are remembered; the oldest are removed first."""


class Commitment(NamedTuple):
    """How and when a unit was committed."""

    step: int
    """First learner step whose checkpoint contains the commit."""
    trained: bool
    """True if the unit entered a gradient; else it was dropped."""
    version: int = -1
    """Policy version that the step updated; -1 for a dropped unit."""


class CommitMemory:
    """The last committed units, oldest first. They are part of the checkpoint.

    If the broker delivers one of them again, its commit was lost, with a killed process or with a connection.
    The learner commits the unit again and does not train it.

    Example:
        >>> committed = CommitMemory(size=2)
        >>> for i, unit in enumerate(["1g0", "1g1", "1g2"]): committed.add(unit, step=i, trained=True)
        >>> "1g0" in committed, committed["1g2"]
        (False, Commitment(step=2, trained=True, version=-1))
    """

    def __init__(self, size: int = REMEMBERED_UNITS) -> None:
        self._size = size
        self._units: OrderedDict[str, Commitment] = OrderedDict()

    def __len__(self) -> int:
        return len(self._units)

    def __contains__(self, unit_id: str) -> bool:
        return unit_id in self._units

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __getitem__(self, unit_id: str) -> Commitment:
        return self._units[unit_id]

    def add(self, unit_id: str, *, step: int, trained: bool, version: int = -1) -> None:
        """Add a unit, and remove the oldest ones beyond the size."""
        self._units[unit_id] = Commitment(step, trained, version)
        self._units.move_to_end(unit_id)
        while len(self._units) > self._size:
            self._units.popitem(last=False)

    def state(self) -> list[Any]:
        """Return the units for the checkpoint."""
        return [[unit_id, *commitment] for unit_id, commitment in self._units.items()]

    def restore(self, state: Iterable[Any]) -> None:
        """Restore the units that `state` returned."""
        self._units.clear()
        for unit_id, *commitment in state:
            self.add(unit_id, **Commitment(*commitment)._asdict())
