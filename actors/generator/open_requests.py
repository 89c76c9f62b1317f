"""Requests of actors that are under way, held ones too: by a key of this generator, and by actor and id. Pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from actors.generator.engine import Request

MAX_REQUESTS, MAX_REQUESTS_OF_ACTOR = 65_536, 16_384
"""Upper limits of the requests under way, in all and of one actor. More are refused, and the actor asks a
different generator."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request whose last chunk is not sent."""

    key: str
    actor: bytes
    """Routing id of the actor's connection."""
    request_id: str
    request: Request
    heard: float
    """Monotonic time of the last chunk, or of the request."""
    sent: int = 0
    """Tokens sent in chunks so far."""


class OpenRequests:
    """All requests that are under way. Ids are the actors' own, so a key of this generator tells them apart."""

    def __init__(self) -> None:
        self._by_key: dict[str, OpenRequest] = {}
        self._keys: dict[tuple[bytes, str], str] = {}
        self._of_actor: Counter[bytes] = Counter()
        """Number of requests under way for each connection, by routing id."""
        self._count = 0

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(self._by_key.values())

    def __getitem__(self, key: str) -> OpenRequest:
        return self._by_key[key]

    def __contains__(self, entry: OpenRequest) -> bool:
        return entry.key in self._by_key

    def of(self, actor: bytes, request_id: str) -> OpenRequest | None:
        """Return the request of an actor; None if it is not under way."""
        key = self._keys.get((actor, request_id))
        return None if key is None else self._by_key[key]

    def why_no_more(self, actor: bytes, request_id: str) -> str:
        """Return why a request of this actor and id cannot be added now, or ""."""
        if (actor, request_id) in self._keys:
            return "a request of this id is running already; ids must not be used twice"
        own, total = self._of_actor[actor], len(self._by_key)
        if total >= MAX_REQUESTS or own >= MAX_REQUESTS_OF_ACTOR:
            return f"{own} requests of this actor, {total} of all are under way"
        return ""

    def new_key(self) -> str:
        """Return a key that no request had before."""
        self._count += 1
        return str(self._count)

    def add(self, entry: OpenRequest) -> OpenRequest:
        """Add a request and return it."""
        self._by_key[entry.key] = entry
        self._keys[entry.actor, entry.request_id] = entry.key
        self._of_actor[entry.actor] += 1
        return entry

    def remove(self, entry: OpenRequest) -> None:
        """Remove a request, if it is there."""
        self._keys.pop((entry.actor, entry.request_id), None)
        if self._by_key.pop(entry.key, None) is not None:
            self._of_actor[entry.actor] -= 1
            if not self._of_actor[entry.actor]:
                del self._of_actor[entry.actor]
