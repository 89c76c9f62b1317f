"""Requests to a generator: whether they are valid, and their state. Without sockets, engines and clocks.

A request is *held* until the policy version that it asks for is in service, then *running* until its last
token. `RequestBook` also counts tokens and the time without a running request.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.arrays import Int32s
from protocol.codec import Buffer, unpack_arrays
from protocol.errors import Malformed
from protocol.messages.generators import Generate

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
