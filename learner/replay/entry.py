"""An entry of the replay table: an item, and the numbers that the selectors use."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from learner.replay.file import StoredEntry, decode_item, encode_item
from learner.trajectory import Trajectory
from learner.units import Unit

Item = TypeVar("Item", Unit, Trajectory)


@dataclass(eq=False)
class ReplayEntry(Generic[Item]):
    """An item and the numbers that the selectors use."""

    item: Item
    key: str
    """Key of the prompt; see `learner.replay.batch.prompt_key`."""
    version: int
    """Policy version of the item's newest token."""
    return_: float = 0.0
    """Return of the trajectory, or mean return of the group."""
    advantage: float = 0.0
    """Advantage at the time of insertion; 0 for groups and rescue rules."""
    success_rate: float = 0.0
    """Mean success of the item's trajectories, in [0, 1]: solved or not, else the return clipped to [0, 1]."""
    tokens: int = 0
    """Action tokens of the item."""
    order: int = 0
    """Number of items that were inserted before it; it names the item."""
    uses: int = 0
    """How often the item has been drawn."""


def stored(entry: ReplayEntry[Item]) -> StoredEntry:
    """Return an entry as it is in a file."""
    numbers = {name: value for name, value in vars(entry).items() if name != "item"}
    return StoredEntry(item=encode_item(entry.item), **numbers)


def restored(row: StoredEntry) -> ReplayEntry[Any]:
    """Return the entry that `stored` wrote."""
    values = {name: getattr(row, name) for name in StoredEntry.__struct_fields__ if name != "item"}
    return ReplayEntry(item=decode_item(row.item), **values)
