"""Bounded memory of what is over, as far back as it may matter."""

from collections import OrderedDict


class Recent:
    """The ``size`` keys that were added last, with a number each.

    Example:
        >>> recent = Recent(2)
        >>> for key in "abc": recent.add(key, 1)
        >>> recent.get("a") is None, recent.get("c")
        (True, 1)
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, key: str) -> bool:
        return key in self._numbers

    def add(self, key: str, number: int) -> None:
        if key in self._numbers:
            self._numbers.move_to_end(key)
        self._numbers[key] = number
        if len(self._numbers) > self._size:
            self._numbers.popitem(last=False)

    def get(self, key: str) -> int | None:
        return self._numbers.get(key)

    def items(self) -> list[tuple[str, int]]:
        """Return keys and numbers, oldest first."""
        return list(self._numbers.items())
