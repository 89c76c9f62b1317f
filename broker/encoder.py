"""Encoding of what the broker sends."""

from collections.abc import Sequence

from broker.core.outbox import Send
from protocol.codec import Buffer, encode, encode_delivery
from protocol.messages.any_message import AnyMessage
from protocol.messages.delivery import Deliver


class Encoder:
    """Encodes actions. A message that leaves for many peers in a row is encoded once."""

    def __init__(self) -> None:
        self._last: AnyMessage | None = None
        self._frames: Sequence[Buffer] = ()

    def frames(self, action: Send) -> Sequence[Buffer]:
        """Return the frames of an action.

        Raises:
            LimitExceeded: the message is too large.
        """
        if isinstance(action.message, Deliver):
            return encode_delivery(action.message, action.frames)
        if action.message is not self._last:
            self._frames, self._last = encode(action.message), action.message
        return self._frames
