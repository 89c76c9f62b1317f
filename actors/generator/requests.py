"""Requests to a generator: which are valid, may run, or are under way, and who sends them. No socket, no clock."""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from actors.generator.engine import Request
from protocol.arrays import Int32s
from protocol.codec import Buffer, unpack_arrays
from protocol.errors import Malformed
from protocol.messages.peers import Generate

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


HOLD_TIMEOUT_S = 300.0
"""Longest wait of a request for a policy version. In lockstep it waits for a learner step and an evaluation."""


def stamp(starts: Sequence[tuple[int, int]], begin: int, end: int) -> Int32s:
    """Return the policy version of each token in ``[begin, end)`` of one answer.

    Args:
        starts: pairs (version, position of the first token that it sampled), in ascending order of position.

    Raises:
        ValueError: no version is known for the token at ``begin``.

    Example:
        >>> stamp([(3, 0), (4, 5)], 3, 7)
        array([3, 3, 4, 4], dtype=int32)
    """
    if not starts or starts[0][1] > begin:
        raise ValueError(f"no version is known for token {begin}: spans {list(starts)}")
    versions = np.empty(end - begin, np.int32)
    for version, first in starts:
        versions[max(first - begin, 0) :] = version
    return versions


def why_invalid(prompt: Sequence[int], request: Generate, *, vocab_size: int, max_model_len: int) -> str:
    """Return what is wrong with a request, or "" if nothing is.

    Example:
        >>> why_invalid([1, 99], Generate(request_id="r", max_tokens=4), vocab_size=50, max_model_len=8)
        'prompt[1] = 99 is outside the vocabulary of 50'
    """
    if not prompt:
        return "the prompt is empty; send at least one token id"
    if len(prompt) >= max_model_len:
        return (
            f"the prompt has {len(prompt)} tokens, which leaves no room in max_model_len = {max_model_len}; "
            "shorten it or raise [generator] max_model_len"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        at = next(i for i, token in enumerate(prompt) if not 0 <= token < vocab_size)
        return f"prompt[{at}] = {prompt[at]} is outside the vocabulary of {vocab_size}"
    # An id past the vocabulary is harmless, because it is never sampled.
    if any(token < 0 for token in request.stop_token_ids):
        return f"stop_token_ids {request.stop_token_ids}: ids are not negative"
    if request.routes_from is not None and request.routes_from > len(prompt):
        return f"routes_from {request.routes_from} is behind the prompt of {len(prompt)} tokens"
    if not (0 < request.top_p <= 1 and request.top_k >= 0 and 0 <= request.temperature < math.inf):
        return (
            f"temperature {request.temperature}, top_p {request.top_p}, top_k {request.top_k}: "
            "needed are a finite temperature >= 0, 0 < top_p <= 1, top_k >= 0"
        )
    return ""


def unpack_prompt(message: Generate, frames: Sequence[Buffer]) -> list[int]:
    """Return the prompt's token ids of a Generate message.

    Raises:
        Malformed: the body does not hold an integer array ``token_ids``.
    """
    if len(frames) != 1:
        raise Malformed(f"Generate {message.request_id!r}: {len(frames)} body frames, expected 1")
    arrays = unpack_arrays(message.arrays, frames[0])
    if "token_ids" not in arrays or arrays["token_ids"].dtype.kind != "i":
        raise Malformed(f"Generate {message.request_id!r}: no integer array token_ids in {sorted(arrays)}")
    ids: list[int] = arrays["token_ids"].tolist()
    return ids


@dataclass(slots=True)
class _Held:
    min_version: int
    deadline: float


@dataclass(frozen=True)
class RequestRates:
    """Rates over the last window: tokens per second, and the share of the time without a running request."""

    tokens_per_second: float = 0.0
    idle_share: float = 1.0


class RequestBook:
    """Held and running requests by key.

    Args:
        now: monotonic seconds at the start. Every method that depends on time takes ``now``.
        gate: no request starts below this version. A generator that joins late sets it to the run's version.

    Example:
        >>> book = RequestBook(now=0.0)
        >>> book.add("a", min_version=2, version=1, now=0.0)
        False
        >>> book.start_held(version=2, now=3.0), book.running, book.held
        (['a'], 1, 0)
    """

    def __init__(self, now: float, *, gate: int = 0) -> None:
        self.gate = gate
        self.tokens_total = 0
        self._held: dict[str, _Held] = {}
        self._running: set[str] = set()
        self._started = self._changed = now
        self._idle = 0.0
        self._window = (now, 0, 0.0)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def held(self) -> int:
        return len(self._held)

    def __contains__(self, key: str) -> bool:
        return key in self._running or key in self._held

    def is_held(self, key: str) -> bool:
        return key in self._held

    def keys(self) -> list[str]:
        """Return the keys of the held and running requests."""
        return [*self._held, *self._running]

    def add(self, key: str, *, min_version: int, version: int, now: float) -> bool:
        """Add a request. Return True if it may run at once."""
        if max(min_version, self.gate) > version:
            self._held[key] = _Held(min_version, now + HOLD_TIMEOUT_S)
            return False
        self._start(key, now)
        return True

    @property
    def lowest_wanted(self) -> int | None:
        """Earliest version that a held request waits for; None if none is held."""
        return min((max(held.min_version, self.gate) for held in self._held.values()), default=None)

    def start_held(self, *, version: int, now: float) -> list[str]:
        """Start the held requests that may run now that ``version`` is in service. Return their keys."""
        ready = [key for key, held in self._held.items() if max(held.min_version, self.gate) <= version]
        for key in ready:
            del self._held[key]
            self._start(key, now)
        return ready

    def expire(self, now: float) -> list[tuple[str, int]]:
        """Remove the held requests whose deadline has passed. Return each with the version it waited for."""
        late = [
            (key, max(held.min_version, self.gate))
            for key, held in self._held.items()
            if held.deadline <= now
        ]
        for key, _ in late:
            del self._held[key]
        return late

    def tokens(self, count: int) -> None:
        """Count newly sampled tokens of any request."""
        self.tokens_total += count

    def finish(self, key: str, now: float) -> None:
        """Remove a request."""
        self._held.pop(key, None)
        if key in self._running:
            self._account_idle_time(now)
            self._running.discard(key)

    def rates(self, now: float) -> RequestRates:
        """Return the rates since the last call."""
        self._account_idle_time(now)
        since, tokens, idle = self._window
        self._window = (now, self.tokens_total, self._idle)
        seconds = now - since
        if seconds <= 0:
            return RequestRates()
        return RequestRates((self.tokens_total - tokens) / seconds, min(1.0, (self._idle - idle) / seconds))

    def seconds(self, now: float) -> tuple[float, float]:
        """Return the seconds since the start: those without a running request, and all of them."""
        self._account_idle_time(now)
        return self._idle, now - self._started

    def _start(self, key: str, now: float) -> None:
        self._account_idle_time(now)
        self._running.add(key)

    def _account_idle_time(self, now: float) -> None:
        if not self._running:
            self._idle += now - self._changed
        self._changed = now


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
