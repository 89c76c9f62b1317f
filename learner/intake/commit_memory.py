"""Which units this lineage of checkpoints is done with. Pure."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

REMEMBERED_UNITS = 65_536


class Commitment(NamedTuple):
    """What became of a unit."""

    step: int
    """The first learner step whose checkpoint knows of it."""
    trained: bool
    """Whether it entered a gradient; else it was dropped."""
    version: int = -1
    """That the step updated, if it was trained."""


class CommitMemory:
    """The last units that were committed, oldest first. They are part of the checkpoint.

    A unit that comes again although it is in here was trained or dropped already, and the broker does not know:
    the commit was lost with it or with us. It is committed again and not trained.

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
        """Remember a unit, and forget the oldest if there are too many."""
        self._units[unit_id] = Commitment(step, trained, version)
        self._units.move_to_end(unit_id)
        while len(self._units) > self._size:
            self._units.popitem(last=False)

    def state(self) -> list[Any]:
        """For the checkpoint."""
        return [[unit_id, *commitment] for unit_id, commitment in self._units.items()]

    def restore(self, state: Iterable[Any]) -> None:
        """As they were."""
        self._units.clear()
        for unit_id, *commitment in state:
            self.add(unit_id, **Commitment(*commitment)._asdict())
