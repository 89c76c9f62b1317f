"""What the broker says, joined: all that is said to a peer at one time leaves as one message."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from broker.books import Send
from protocol.codec import MAX_JOINED, Buffer, encode_delivery, encode_joined
from protocol.errors import LimitExceeded, LinkDown
from protocol.messages import AnyMessage, Deliver


class Outbox:
    """An envelope a peer, which `post` sends: a message costs ZeroMQ and CURVE more than its bytes.

    Args:
        send: takes the frames of a message, the routing id first; raises LinkDown when it takes no more.
        route: connection of a peer; None: it has never been here since our start, and ZeroMQ would drop it, too.
        not_sent: told of each message that could not be sent, and why.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Buffer]], None],
        route: Callable[[str], bytes | None],
        not_sent: Callable[[str, AnyMessage, Exception], None],
    ) -> None:
        self._transmit, self._route, self._not_sent = send, route, not_sent
        self._envelopes = defaultdict[str, list[AnyMessage]](list)

    def say(self, actions: Iterable[Send]) -> None:
        """Put them into the envelopes. A delivery is a message of its own, behind what was said before it."""
        for action in actions:
            if isinstance(action.message, Deliver):
                self._send(action.peer, self._envelopes.pop(action.peer, []))
                self._deliver(action.peer, action.message, action.frames)
                continue
            envelope = self._envelopes[action.peer]
            envelope.append(action.message)
            if len(envelope) == MAX_JOINED:
                self._send(action.peer, self._envelopes.pop(action.peer))

    def post(self) -> None:
        """Send what has been said since the last time."""
        envelopes, self._envelopes = self._envelopes, defaultdict(list)
        for peer, messages in envelopes.items():
            self._send(peer, messages)

    def _send(self, peer: str, messages: list[AnyMessage]) -> None:
        route = self._route(peer)
        if route is None or not messages:
            return
        try:
            frames = encode_joined(messages)
        except LimitExceeded as error:
            if len(messages) == 1:
                self._not_sent(peer, messages[0], error)
                return
            for message in messages:
                self._send(peer, [message])
            return
        try:
            self._transmit([route, *frames])
        except LinkDown as error:
            for message in messages:
                self._not_sent(peer, message, error)

    def _deliver(self, peer: str, message: Deliver, frames: Sequence[tuple[bytes, Buffer]]) -> None:
        if (route := self._route(peer)) is None:
            return
        try:
            self._transmit([route, *encode_delivery(message, frames)])
        except (LimitExceeded, LinkDown) as error:
            self._not_sent(peer, message, error)
