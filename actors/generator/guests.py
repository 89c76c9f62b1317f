"""State of the actors that are connected to a generator: may it leave? Without sockets and clocks."""

from collections import OrderedDict
from dataclasses import dataclass

SILENT_S = 5.0
"""Time without a `Stay` after which a draining generator takes it that an actor does not need it."""
MAX_GUESTS = 4_096


@dataclass(slots=True)
class _Guest:
    heard: float
    episodes: int = 0
    answered: bool = False
    """True if the actor has spoken since it was told that the generator drains."""


class Guests:
    """Actors that are connected to a generator, by routing id, and the episodes that need the generator.

    A draining generator may leave once each actor has said that it needs it no more, or is silent.

    Example:
        >>> guests = Guests()
        >>> guests.heard(b"a", 0, now=0.0)
        False
        >>> guests.drain(now=1.0), guests.needed(now=2.0)
        ([b'a'], 1)
        >>> _ = guests.heard(b"a", 0, now=2.0)
        >>> guests.needed(now=2.0)
        0
    """

    def __init__(self) -> None:
        self._guests: OrderedDict[bytes, _Guest] = OrderedDict()
        self.draining = False

    def heard(self, actor: bytes, episodes: int, now: float) -> bool:
        """Note what an actor needs. Return True if it is to be told that the generator drains."""
        guest = self._guests.get(actor)
        self._guests[actor] = _Guest(now, episodes, answered=guest is not None and self.draining)
        self._guests.move_to_end(actor)
        if len(self._guests) > MAX_GUESTS:
            self._guests.popitem(last=False)
        return guest is None and self.draining

    def asked(self, actor: bytes, now: float) -> bool:
        """Note a request, in case its actor says no `Stay`. Return True if it is to be told of the draining."""
        return actor not in self._guests and self.heard(actor, 1, now)

    def left(self, actor: bytes) -> None:
        """Forget an actor that has said Goodbye."""
        self._guests.pop(actor, None)

    def drain(self, now: float) -> list[bytes]:
        """Begin to drain. Return the actors to tell; each has `SILENT_S` to answer."""
        self.draining = True
        for guest in self._guests.values():
            guest.heard, guest.answered = now, False
        return list(self._guests)

    def needed(self, now: float) -> int:
        """Return for how many episodes a draining generator is to stay; an actor yet to answer counts as one."""
        recent = [guest for guest in self._guests.values() if now - guest.heard < SILENT_S]
        return sum(guest.episodes if guest.answered else 1 for guest in recent)
