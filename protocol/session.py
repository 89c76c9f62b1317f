"""The peer's side of a connection to the broker, without sockets and clocks.

A `Session` decides what to send and when: Hello until a Welcome comes, then heartbeats in the rhythm that the
Welcome asks for. It says Hello again when the broker has been silent, when the broker does not know this peer
(it was restarted), or when the connection was replaced. The owner of the socket passes ``now`` (monotonic
seconds) in and sends the messages that come out.
"""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from protocol.codec import MINOR, AnyMessage
from protocol.messages.peers import Heartbeat, Hello, Refused, SourceComplaint, Welcome

HELLO_RETRY_S = 1.0
MISSED_BEATS = 5
SLOW_BROKER_S = 5.0
SHORTEST_BEAT_S, LONGEST_BEAT_S = 0.01, 600.0
"""Bounds of the time between heartbeats, so that no Welcome makes a peer flood or forget the broker."""


@dataclass(frozen=True)
class Progress:
    """The content of a heartbeat; see `protocol.messages.peers.Heartbeat`."""

    progress: float = 0.0
    busy: bool = False
    policy_version: int = 0
    gauges: tuple[tuple[str, float], ...] = ()
    patience_s: float = 0.0
    note: str = ""
    complaints: tuple[SourceComplaint, ...] = ()


LONG_BYTES = 1_000
"""Size from which messages count as long. Every path passes packets of this size and of the headers before it."""
BURST_S = 0.05
"""Messages that leave within this time may share packets, so their sizes are added."""
PROOFS = 2
"""Answers to heartbeats behind a long message that prove its arrival. The first may be one to an earlier heartbeat."""
FAILURES = 2
"""Connections in a row on which the long message did not arrive, before it is said. One may have other reasons."""
SHORT_ONLY = "short messages pass"
"""First words of the trouble of a path that loses large packets."""


class LongMessages:
    """Notices that short messages pass, and long ones do not: large packets are lost on the way.

    Messages of a connection arrive in order. So if the broker answers a heartbeat behind a long message, that message
    has arrived. If a connection that has been joined ends in silence instead, the long message did not.

    Example:
        >>> long = LongMessages()
        >>> for start in (0.0, 7.0):
        ...     long.sent(5_000, start); long.beaten(); long.lost()
        >>> long.trouble[:54]
        'short messages pass, one of 5,000 bytes did not, 2 tim'
        >>> long.sent(5_000, 14.0); long.beaten(); long.answered(); long.answered(); long.trouble
        ''
    """

    def __init__(self) -> None:
        self.trouble = ""
        """What is wrong with the path, with the cure; "" if nothing is known."""
        self._unproved = self._failed = self._answers = 0
        self._beaten = False
        self._burst, self._at = 0, 0.0

    def sent(self, nbytes: int, now: float) -> None:
        """Note a message that leaves over a connection that is joined."""
        self._burst = nbytes + (self._burst if now - self._at < BURST_S else 0)
        self._at = now
        if self._burst >= LONG_BYTES and not self._unproved:
            self._answers, self._beaten = 0, False
        if self._burst >= LONG_BYTES and not self._beaten:
            self._unproved = max(self._unproved, self._burst)

    def beaten(self) -> None:
        """Note a heartbeat that leaves behind what was sent."""
        self._beaten = True

    def answered(self) -> None:
        """Note an answer to a heartbeat."""
        self._answers += self._beaten
        if self._unproved and self._answers >= PROOFS:
            self._unproved = self._failed = 0
            self.trouble = ""

    def lost(self) -> None:
        """Note that the connection has ended in silence, or was replaced."""
        if not self._unproved:
            return
        if not self._beaten:  # No heartbeat has asked after the message, so its end says nothing of the path.
            self._unproved = 0
            return
        self._failed += 1
        if self._failed >= FAILURES:
            self.trouble = (
                f"{SHORT_ONLY}, one of {self._unproved:,} bytes did not, {self._failed} times in a row: large packets "
                "are lost on the way to the broker, or the line is very slow; look at the MTU (docs/run/security.md)"
            )
        self._unproved = 0


class Session:
    """State of one peer's connection: joined or not, when to send next, when the broker was last heard.

    Example:
        >>> session = Session(Hello(role="actor", peer="a0", incarnation=1), now=0.0)
        >>> [type(m).__name__ for m in session.due(0.0, Progress)]
        ['Hello']
        >>> session.due(0.5, Progress)
        []
        >>> session.received(Welcome(run="r", epoch=0, heartbeat_s=1.0, policy_version=0), now=0.6)
        True
        >>> [type(m).__name__ for m in session.due(1.7, lambda: Progress(progress=3.0))]
        ['Heartbeat']
        >>> [type(m).__name__ for m in session.due(99.0, Progress)]  # silence: start over
        ['Hello']
    """

    def __init__(self, hello: Hello, now: float) -> None:
        self.hello = hello
        self.welcome: Welcome | None = None
        self.joins = 0
        self.minor = MINOR
        """Minor version of the protocol that the broker spoke in its last message."""
        self.policy_version = 0
        """Policy version of the last Welcome; it stays while the session joins again."""
        self.long = LongMessages()
        """Whether long messages arrive; the owner of the socket tells it what leaves."""
        self._attempts = self._void = 0
        self._beat_s = HELLO_RETRY_S
        self._heard = now
        self._next = now

    @property
    def joined(self) -> bool:
        return self.welcome is not None

    def silent_for(self, now: float) -> float:
        """Return the seconds since the last message from the broker."""
        return now - self._heard

    def received(self, message: AnyMessage, now: float) -> bool:
        """Note a message from the broker; return True if it is a Welcome by which the session joins."""
        self._heard = now
        if isinstance(message, Heartbeat):
            self.long.answered()
        match message:
            case Welcome() if message.attempt < self._void:
                # The answer to a Hello over an earlier connection; the Hello of this one has yet to leave.
                pass
            case Welcome() if message.attempt + 1 < self._attempts:
                # The answer to a Hello that was repeated since. The broker counts credit from zero at each
                # Hello, so joining now would announce the credit twice. The answer to the last Hello is on
                # its way.
                if self.welcome is None:
                    self._next = now + SLOW_BROKER_S
            case Welcome():
                self.welcome, self.policy_version = message, message.policy_version
                self.joins += 1
                # In this order of arguments NaN becomes the shortest time.
                self._beat_s = min(LONGEST_BEAT_S, max(SHORTEST_BEAT_S, message.heartbeat_s))
                self._next = now + self._beat_s
                return True
            case Refused(code="unknown_peer"):
                self.welcome = None
                self._next = now
        return False

    def reconnected(self, now: float) -> None:
        """Join again after the connection was replaced, so that both sides repeat what may be lost."""
        self.welcome, self._void = None, self._attempts
        self.long.lost()
        self._next = now

    def due(self, now: float, progress: Callable[[], Progress]) -> list[AnyMessage]:
        """Return the messages to send now.

        Args:
            progress: called for the content of a heartbeat, only if one is due.
        """
        if self.welcome and self.silent_for(now) > MISSED_BEATS * self._beat_s:
            self.welcome = None
            self.long.lost()
            self._next = now
        if now < self._next:
            return []
        if self.welcome is None:
            self._next = now + HELLO_RETRY_S
            self._attempts += 1
            return [replace(self.hello, attempt=self._attempts - 1)]
        self._next = now + self._beat_s
        return [self.heartbeat(progress)]

    def sent(self, nbytes: int, now: float) -> None:
        """Note the size of a message that leaves now."""
        if self.welcome is not None:
            self.long.sent(nbytes, now)

    def heartbeat(self, progress: Callable[[], Progress]) -> Heartbeat:
        """Return the heartbeat to send now. What is wrong with the path stands before the peer's own note."""
        content = progress()
        self.long.beaten()
        return Heartbeat(
            progress=content.progress,
            busy=content.busy,
            policy_version=content.policy_version,
            gauges=dict(content.gauges),
            patience_s=content.patience_s,
            note="; ".join(filter(None, (self.long.trouble, content.note))),
            complaints=list(content.complaints),
        )
