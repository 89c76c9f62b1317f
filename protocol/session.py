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
from protocol.messages.peers import Heartbeat, Hello, Refused, Welcome

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
        self._next = now

    def due(self, now: float, progress: Callable[[], Progress]) -> list[AnyMessage]:
        """Return the messages to send now.

        Args:
            progress: called for the content of a heartbeat, only if one is due.
        """
        if self.welcome and self.silent_for(now) > MISSED_BEATS * self._beat_s:
            self.welcome = None
            self._next = now
        if now < self._next:
            return []
        if self.welcome is None:
            self._next = now + HELLO_RETRY_S
            self._attempts += 1
            return [replace(self.hello, attempt=self._attempts - 1)]
        self._next = now + self._beat_s
        content = progress()
        return [
            Heartbeat(
                progress=content.progress,
                busy=content.busy,
                policy_version=content.policy_version,
                gauges=dict(content.gauges),
                patience_s=content.patience_s,
                note=content.note,
            )
        ]
