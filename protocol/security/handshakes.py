"""Admission of handshakes: which keys may connect, how often, and whose they are.

Pure, except that it reads the keys folder.
"""

import logging
from collections import Counter, OrderedDict
from pathlib import Path
from typing import NamedTuple

from protocol.errors import KeysUnusable
from protocol.security.keys import AllowList, KeyRole, Principal, signature

log = logging.getLogger(__name__)

RELOAD_S = 0.5
MAX_ADDRESSES = 4_096


class Rate(NamedTuple):
    """A rate limit: ``burst`` events at once, and ``per_s`` events a second on average."""

    per_s: float
    burst: float


TOTAL_RATE = Rate(500.0, 2_000.0)
ADDRESS_RATE = Rate(100.0, 1_000.0)
"""Rate for one address. A thousand actors of one host may reconnect at once when their broker restarts."""


class TokenBucket:
    """A token bucket: it admits a burst of events, and then a rate of them.

    Example:
        >>> bucket = TokenBucket(Rate(per_s=1.0, burst=2.0), now=0.0)
        >>> [bucket.take(t) for t in (0.0, 0.0, 0.0, 1.0, 1.5)]
        [True, True, False, True, False]
    """

    __slots__ = ("_at", "_left", "_rate")

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate, self._left, self._at = rate, rate.burst, now

    def take(self, now: float) -> bool:
        """Return whether one more event may pass now, and count it if so."""
        self._left = min(self._rate.burst, self._left + max(0.0, now - self._at) * self._rate.per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Verdict(NamedTuple):
    """Decision on a handshake."""

    admitted: bool
    temporary: bool = False
    """True if only the rate was too high, so that the peer may try again."""
    why: str = ""


class Admission:
    """The allow-list of one listening socket: as its keys folder has it now, or as the broker told it.

    Args:
        folder: keys folder; changes are noticed within `RELOAD_S`.
        roles: roles whose keys may connect.
        now: monotonic seconds.

    Raises:
        KeysUnusable: the folder cannot be read, or others can write to it.
    """

    def __init__(
        self,
        folder: Path,
        roles: frozenset[KeyRole],
        now: float,
        *,
        of_all: Rate = TOTAL_RATE,
        of_one_address: Rate = ADDRESS_RATE,
    ) -> None:
        self._folder, self._roles = folder, roles
        self.allowed = AllowList.read(folder)
        self._signature = signature(folder)
        self._looked, self._told = now, False
        self._all = TokenBucket(of_all, now)
        self._one, self._addresses = of_one_address, OrderedDict[str, TokenBucket]()
        self.refused: Counter[str] = Counter()
        """Number of refused handshakes, by reason."""

    def handshake(self, public: str, address: str, now: float) -> Verdict:
        """Decide on a peer at an address that has proved to own this key (Z85)."""
        if not self._bucket(address, now).take(now):
            return self._refuse("address_rate", "too many handshakes from this address", temporary=True)
        if not self._all.take(now):
            return self._refuse("rate", "too many handshakes", temporary=True)
        self.reload(now)
        who = self.allowed.get(public)
        if who is None:
            where = "among those that the broker admits" if self._told else "in the keys folder"
            return self._refuse("unknown_key", f"this key is not {where}")
        if who.role not in self._roles:
            return self._refuse("role", f"keys of the role {who.role} are not for this socket")
        return Verdict(True)

    def sender(self, public: str) -> Principal | None:
        """Return the principal of the key of a message; None if the key was revoked or never admitted."""
        who = self.allowed.get(public)
        return who if who is not None and who.role in self._roles else None

    def admit(self, allowed: AllowList) -> None:
        """Admit the keys of this list and no others. From now on the folder does not count."""
        self.allowed, self._told = allowed, True

    def reload(self, now: float) -> None:
        """Read the folder again if it has changed; while it cannot be read, the list stays as it is."""
        if self._told or now - self._looked < RELOAD_S:
            return
        self._looked = now
        try:
            seen = signature(self._folder)
            if seen != self._signature:
                self.allowed, self._signature = AllowList.read(self._folder), seen
                log.info("keys folder %s has changed: %d keys are admitted", self._folder, len(self.allowed))
        except (OSError, KeysUnusable) as error:
            log.error("keys folder %s: %s; who is admitted stays as it was", self._folder, error)

    def _bucket(self, address: str, now: float) -> TokenBucket:
        bucket = self._addresses.pop(address, None) or TokenBucket(self._one, now)
        # Addresses stay in the order of use, so the one dropped below is the longest unused.
        self._addresses[address] = bucket
        if len(self._addresses) > MAX_ADDRESSES:
            self._addresses.popitem(last=False)
        return bucket

    def _refuse(self, reason: str, why: str, *, temporary: bool = False) -> Verdict:
        self.refused[reason] += 1
        return Verdict(False, temporary, why)
