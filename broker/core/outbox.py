"""Messages that the broker has decided to send. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from broker.core.ledger import Ledger
from protocol.codec import Buffer
from protocol.messages.any_message import AnyMessage
from protocol.messages.peers import Refused


class Send(Struct, frozen=True):
    """Action: send ``message`` to ``peer``. ``frames`` are the (header, body) pairs that follow a Deliver."""

    peer: str
    message: AnyMessage
    frames: Sequence[tuple[bytes, Buffer]] = ()


class BrokerOutbox:
    """Queue of actions, in the order in which the parts of the `Dispatcher` put them in."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._queue: list[Send] = []

    def send(self, peer: str, message: AnyMessage, frames: Sequence[tuple[bytes, Buffer]] = ()) -> None:
        """Queue a message to a peer."""
        self._queue.append(Send(peer, message, frames))

    def refuse(self, peer: str, code: str, text: str, *, fatal: bool = False) -> None:
        """Refuse a message of a peer, and count the refusal."""
        self._ledger.refuse(code)
        self.send(peer, Refused(code=code, message=text, fatal=fatal))

    def take(self) -> list[Send]:
        """Return the actions queued since the last call."""
        queue, self._queue = self._queue, []
        return queue
