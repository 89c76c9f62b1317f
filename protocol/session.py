"""The peer's side of a connection to the broker, without sockets and clocks.

A `Session` says what to send and when: Hello until a Welcome comes, heartbeats in the rhythm that the Welcome
asks for, Hello again when the broker has been silent or does not know us (it was restarted), or when the connection
is another than before. Whoever owns the socket passes ``now`` (monotonic seconds) in and sends what comes out.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from protocol.messages import AnyMessage, Heartbeat, Hello, Refused, Welcome

HELLO_RETRY_S = 1.0
MISSED_BEATS = 5
SLOW_BROKER_S = 5.0
SHORTEST_BEAT_S, LONGEST_BEAT_S = 0.01, 600.0
"""Whatever rhythm a Welcome asks for, a peer neither floods the broker nor forgets it."""


@dataclass(frozen=True)
class Progress:
    """What a heartbeat reports; see `protocol.messages.Heartbeat`."""

    progress: float = 0.0
    busy: bool = False
    policy_version: int = 0
    gauges: tuple[tuple[str, float], ...] = ()


class Session:
    """State of one peer's connection: joined or not, when to speak next, whether the broker still lives.

    Example:
        >>> session = Session(Hello(role="actor", peer="a0", incarnation=1), now=0.0)
        >>> [type(m).__name__ for m in session.due(0.0, Progress())]
        ['Hello']
        >>> session.due(0.5, Progress())
        []
        >>> session.received(Welcome(run="r", epoch=0, heartbeat_s=1.0, policy_version=0), now=0.6)
        True
        >>> [type(m).__name__ for m in session.due(1.7, Progress(progress=3.0))]
        ['Heartbeat']
        >>> [type(m).__name__ for m in session.due(99.0, Progress())]  # silence: start over
        ['Hello']
    """

    def __init__(self, hello: Hello, now: float) -> None:
        self.hello = hello
        self.welcome: Welcome | None = None
        self.joins = 0
        self.policy_version = 0
        """Of the last Welcome, also while we are about to join again."""
        self._attempts = self._void = 0
        self._beat_s = HELLO_RETRY_S
        self._heard = now
        self._next = now

    @property
    def joined(self) -> bool:
        return self.welcome is not None

    def silent_for(self, now: float) -> float:
        """Seconds since the broker was last heard."""
        return now - self._heard

    def received(self, message: AnyMessage, now: float) -> bool:
        """Note a message from the broker; True when it made us join (again)."""
        self._heard = now
        match message:
            case Welcome() if message.attempt < self._void:
                pass  # the answer to a Hello of the connection before; the one of this connection is still to go
            case Welcome() if message.attempt + 1 < self._attempts:
                # The answer to a Hello that we have repeated since; joining by it would announce twice what
                # the broker counts anew with each. The answer to the last one is on its way.
                if self.welcome is None:
                    self._next = now + SLOW_BROKER_S
            case Welcome():
                self.welcome, self.policy_version = message, message.policy_version
                self.joins += 1
                self._beat_s = min(
                    LONGEST_BEAT_S, max(SHORTEST_BEAT_S, message.heartbeat_s)
                )  # NaN: the shortest
                self._next = now + self._beat_s
                return True
            case Refused(code="unknown_peer"):
                self.welcome = None
                self._next = now
        return False

    def reconnected(self, now: float) -> None:
        """The connection is another: join again, so that both sides say again what may be lost with the one before."""
        self.welcome, self._void = None, self._attempts
        self._next = now

    def due(self, now: float, progress: Progress) -> list[AnyMessage]:
        """Messages to send now."""
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
        return [
            Heartbeat(
                progress=progress.progress,
                busy=progress.busy,
                policy_version=progress.policy_version,
                gauges=dict(progress.gauges),
            )
        ]
