"""Who may connect to a socket of ours, how often, and whom a key stands for. Pure but for the keys folder."""

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
    """``burst`` at once, and ``per_s`` from then on."""

    per_s: float
    burst: float


OF_ALL = Rate(500.0, 2_000.0)
OF_ONE_ADDRESS = Rate(100.0, 1_000.0)
"""A thousand actors of one host come back at once when their broker does."""


class TokenBucket:
    """Lets a burst through, and a rate.

    Example:
        >>> bucket = TokenBucket(Rate(per_s=1.0, burst=2.0), now=0.0)
        >>> [bucket.take(t) for t in (0.0, 0.0, 0.0, 1.0, 1.5)]
        [True, True, False, True, False]
    """

    __slots__ = ("_at", "_left", "_rate")

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate, self._left, self._at = rate, rate.burst, now

    def take(self, now: float) -> bool:
        """Whether one more may pass now."""
        self._left = min(self._rate.burst, self._left + max(0.0, now - self._at) * self._rate.per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Verdict(NamedTuple):
    """What becomes of a handshake."""

    admitted: bool
    for_now: bool = False
    """Refused for its rate only."""
    why: str = ""


class Admission:
    """The allow-list of one listening socket, as its keys folder has it now.

    Args:
        folder: keys folder; it is looked at again every `RELOAD_S`.
        roles: whose keys may connect.
        now: monotonic seconds.

    Raises:
        KeysUnusable: the folder cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        roles: frozenset[KeyRole],
        now: float,
        *,
        of_all: Rate = OF_ALL,
        of_one_address: Rate = OF_ONE_ADDRESS,
    ) -> None:
        self._folder, self._roles = folder, roles
        self.allowed = AllowList.read(folder)
        self._signature = signature(folder)
        self._looked = now
        self._all = TokenBucket(of_all, now)
        self._one, self._addresses = of_one_address, OrderedDict[str, TokenBucket]()
        self.refused: Counter[str] = Counter()
        """Handshakes refused, by reason."""

    def handshake(self, public: str, address: str, now: float) -> Verdict:
        """Somebody at an address has proved to own this key (Z85)."""
        if not self._bucket(address, now).take(now):
            return self._refuse("address_rate", "too many handshakes from this address", for_now=True)
        if not self._all.take(now):
            return self._refuse("rate", "too many handshakes", for_now=True)
        self.reload(now)
        who = self.allowed.get(public)
        if who is None:
            return self._refuse("unknown_key", "this key is not in the keys folder")
        if who.role not in self._roles:
            return self._refuse("role", f"keys of the role {who.role} are not for this socket")
        return Verdict(True)

    def sender(self, public: str) -> Principal | None:
        """Whom the key of a message stands for; None: it has been revoked, or never was admitted."""
        who = self.allowed.get(public)
        return who if who is not None and who.role in self._roles else None

    def reload(self, now: float) -> None:
        """Take over what has changed in the folder; while it cannot be read, the list stays as it is."""
        if now - self._looked < RELOAD_S:
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
        self._addresses[address] = bucket  # the newest last
        if len(self._addresses) > MAX_ADDRESSES:
            self._addresses.popitem(last=False)
        return bucket

    def _refuse(self, reason: str, why: str, *, for_now: bool = False) -> Verdict:
        self.refused[reason] += 1
        return Verdict(False, for_now, why)
