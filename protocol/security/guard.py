"""The server's half of CURVE: which keys may connect, a ZAP handler, and sockets that know the key of each message."""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from protocol.errors import KeysUnusable
from protocol.security.client import REFUSED_FOR_GOOD, REFUSED_FOR_NOW
from protocol.security.keys import AllowList, KeyRole, Principal, key_pair, signature
from protocol.sockets import AsyncSocket, LeanRouter, router

log = logging.getLogger(__name__)


class Connection(NamedTuple):
    """A socket of ZeroMQ in this process, by descriptor and inode."""

    descriptor: int
    inode: int

    @classmethod
    def of(cls, frame: "zmq.Frame") -> "Connection | None":
        """Return the connection that a frame came by; None if it is unknown, as it is once it has ended."""
        try:
            descriptor = int(frame.get(zmq.SRCFD))
            status = os.fstat(descriptor)
        except (zmq.ZMQError, OSError, ValueError):
            return None
        return cls(descriptor, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None

    @property
    def is_open(self) -> bool:
        """Whether the connection is still open, as far as the kernel and ZeroMQ know."""
        try:
            return os.fstat(self.descriptor).st_ino == self.inode
        except OSError:
            return False

    def cut(self) -> bool:
        """End the connection; to ZeroMQ the other side has ended it. Return False if it had ended before."""
        with contextlib.suppress(OSError):
            # Work on a duplicate, which no other thread can close between the check and the shutdown.
            own = os.dup(self.descriptor)
            with socket.socket(fileno=own) as held:
                if os.fstat(own).st_ino == self.inode:
                    held.shutdown(socket.SHUT_RDWR)
                    return True
        return False


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


ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
USER_ID = "User-Id"
LOG_EVERY_S = 5.0
NOTICE_S = 1.0
"""Time from the first message under a key that is not admitted to the cut; the peer can learn the reason."""
ADMITS: dict[KeyRole, frozenset[KeyRole]] = {
    "broker": frozenset({"learner", "generator", "actor", "host"}),
    "generator": frozenset({"actor"}),
}

OnGuardedMessage = Callable[[Any, Principal | None], None]


class Guard:
    """Keys, allow-list and ZAP handler of one listening socket; at most one in a ZeroMQ context.

    Args:
        folder: keys folder.
        role, peer: owner of the keys that the socket uses.

    Raises:
        KeysUnusable: the folder lacks these keys, or cannot be read.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path, role: KeyRole, peer: str = ""
    ) -> None:
        self._own, self._domain = key_pair(folder, role, peer), role.encode()
        self.admission = Admission(folder, ADMITS[role], time.monotonic())
        self._logged = -LOG_EVERY_S
        handler = context.socket(zmq.ROUTER)
        handler.bind(ZAP_ENDPOINT)
        self._handler = AsyncSocket(handler, self._asked)

    @property
    def public_key(self) -> str:
        """The public key (Z85) that the socket shows to clients."""
        return self._own.public.decode()

    def router(self, context: "zmq.Context[zmq.Socket[bytes]]") -> LeanRouter:
        """Create an encrypted ROUTER for the caller to bind."""
        socket = router(context)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, self._domain)
        # Without this, ZeroMQ admits every peer if no handler answers.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        return socket

    def sender(self, user_id: str) -> Principal | None:
        """Return the principal whose key a message came under; None if the key is not admitted now."""
        self.admission.reload(time.monotonic())
        return self.admission.sender(user_id)

    def admit(self, allowed: AllowList) -> None:
        """Admit the keys of this list and no others, whatever the folder holds."""
        self.admission.admit(allowed)

    def close(self) -> None:
        """Close the handler; call it after the guarded socket is closed."""
        self._handler.close()

    def _asked(self, frames: list[bytes]) -> None:
        """Answer one ZAP request.

        Frames: routing id, delimiter, version, request id, domain, address, identity, mechanism, key.
        """
        if len(frames) != 9 or frames[2] != ZAP_VERSION:
            log.error("a ZAP request of %d frames is none; ZeroMQ lets its connection wait", len(frames))
            return
        request_id, domain, address, mechanism, key = frames[3], frames[4], frames[5], frames[7], frames[8]
        if domain != self._domain or mechanism != b"CURVE" or len(key) != 32:
            self._answer(frames[0], request_id, REFUSED_FOR_GOOD, "not encrypted", "")
            return
        public, where, now = z85.encode(key).decode(), address.decode("utf-8", "replace"), time.monotonic()
        verdict = self.admission.handshake(public, where, now)
        if verdict.admitted:
            self._answer(frames[0], request_id, 200, "OK", public)
            return
        if now - self._logged >= LOG_EVERY_S:
            self._logged = now
            count = self.admission.refused.total()
            log.warning(
                "key %s... at %s refused: %s (%d so far)", public[:8], where or "ipc", verdict.why, count
            )
        status = REFUSED_FOR_NOW if verdict.temporary else REFUSED_FOR_GOOD
        self._answer(frames[0], request_id, status, verdict.why, "")

    def _answer(self, route: bytes, request_id: bytes, status: int, text: str, user_id: str) -> None:
        answer = [ZAP_VERSION, request_id, str(status).encode(), text.encode(), user_id.encode(), b""]
        self._handler.send([route, b"", *answer])


class GuardedSocket(AsyncSocket):
    """An AsyncSocket that passes each message on with the principal of its key; None: it is not admitted."""

    def __init__(self, socket: LeanRouter, on_message: OnGuardedMessage, guard: Guard) -> None:
        self._router, self._guard = socket, guard
        self._first: zmq.Frame | None = None
        self._doomed: set[Connection] = set()
        super().__init__(socket, lambda frames: on_message(frames, None))
        self._handle = on_message

    def connection(self) -> Connection | None:
        """Return the connection of the message that is being handled; None if it is unknown."""
        return None if self._first is None else Connection.of(self._first)

    def _receive_once(self) -> tuple[Any, ...]:
        # Only a frame that is not copied has the user id.
        first = self._socket.recv(zmq.DONTWAIT, copy=False)
        frames = self._router.recv_behind([first.bytes])
        try:
            sender = self._guard.sender(str(first.get(USER_ID)))
        except zmq.ZMQError:
            sender = None
        self._first = first
        if sender is None:
            self._cut_soon(Connection.of(first))
        return frames, sender

    def _cut_soon(self, connection: Connection | None) -> None:
        if connection is None or connection in self._doomed:
            return
        self._doomed.add(connection)
        asyncio.get_running_loop().call_later(NOTICE_S, self._cut_connection, connection)

    def _cut_connection(self, connection: Connection) -> None:
        self._doomed.discard(connection)
        if not self._closed and connection.cut():
            log.info("a connection was cut: its key is admitted no more")
