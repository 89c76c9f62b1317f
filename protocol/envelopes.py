"""Envelopes: messages to one peer in one turn of a loop travel as one ZeroMQ message.

A message costs ZeroMQ, CURVE and the kernel more than its bytes do, so several that wait leave together::

    frame 0   prelude
    frame 1   header: a MessagePack array with [frames behind the header, header] of each enclosed message
    ...       the frames behind the headers, in order

A message that waits alone leaves without an envelope, so nothing is slower where few messages are sent.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from protocol.codec import MAX_FRAMES, MAX_HEADER_BYTES, PRELUDE, Buffer, check_frames, decode, short_error
from protocol.errors import Malformed, ProtocolError
from protocol.messages.any_message import AnyMessage

log = logging.getLogger(__name__)

MAX_ENCLOSED = 32
"""Upper limit of the messages in one envelope, which the receiver handles at a time."""
MAX_ENVELOPE_BYTES = 1 << 20
"""Upper limit of the bytes in one envelope; a larger message travels alone."""
ENVELOPE_HEADER_BYTES = 5
ENTRY_BYTES = 6

_ARRAYS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
"""First bytes of MessagePack arrays, with which the header of an envelope begins."""
_MAPS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
_encoder = msgspec.msgpack.Encoder()
_BEHIND = tuple(b"\x92" + _encoder.encode(behind) for behind in range(64))
_decoder = msgspec.msgpack.Decoder(
    Annotated[
        list[tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_FRAMES)], msgspec.Raw]],
        msgspec.Meta(min_length=1, max_length=MAX_ENCLOSED),
    ]
)


class _Envelope:
    """The messages of one envelope, all to one peer, in order."""

    def __init__(self) -> None:
        self.messages: list[Sequence[Buffer]] = []
        self.nbytes = self.header_bytes = 0

    def takes(self, header: int, nbytes: int) -> bool:
        """Return whether a message with a header and a total of these many bytes still fits."""
        return (
            len(self.messages) < MAX_ENCLOSED
            and self.nbytes + nbytes <= MAX_ENVELOPE_BYTES
            and self.header_bytes + header + ENTRY_BYTES <= MAX_HEADER_BYTES - ENVELOPE_HEADER_BYTES
        )

    def add(self, frames: Sequence[Buffer], header: int, nbytes: int) -> None:
        self.messages.append(frames)
        self.nbytes += nbytes
        self.header_bytes += header + ENTRY_BYTES

    def frames(self, first: int) -> Sequence[Buffer]:
        """Return the frames to send; ``first`` is the number of frames before the prelude."""
        messages = self.messages
        if len(messages) == 1:
            return messages[0]
        header = bytearray(b"\xdc" + len(messages).to_bytes(2, "big"))
        behind: list[Buffer] = []
        for frames in messages:
            header += _BEHIND[len(frames) - first - 2]
            header += frames[first + 1]
            behind += frames[first + 2 :]
        return [*messages[0][:first], PRELUDE, bytes(header), *behind]


def enclose(messages: Sequence[Sequence[Buffer]], *, addressed: bool = False) -> list[Sequence[Buffer]]:
    """Put messages into envelopes, and return the frames to send. The order of messages to each peer is kept.

    Args:
        addressed: each message has the routing id of its receiver as its first frame.

    Example:
        >>> from protocol.codec import decode, encode
        >>> from protocol.messages.peers import Drain
        >>> from protocol.messages.tasks import TaskCredit
        >>> [envelope] = enclose([encode(TaskCredit(tasks=3)), encode(Drain())])
        >>> [decode(one)[0] for one in open_envelope(envelope)]
        [TaskCredit(tasks=3, void=False), Drain(reason='')]
    """
    # The common case where few messages are sent.
    if len(messages) < 2:
        return list(messages)
    first = int(addressed)
    out: list[Sequence[Buffer]] = []
    filling: dict[Buffer, _Envelope] = {}
    for frames in messages:
        receiver = frames[0] if addressed else b""
        envelope = filling.get(receiver)
        if not _may_be_enclosed(frames, first):
            if envelope is not None:
                out.append(filling.pop(receiver).frames(first))
            out.append(frames)
            continue
        header, nbytes = len(frames[first + 1]), sum(map(len, frames))
        if envelope is None or not envelope.takes(header, nbytes):
            if envelope is not None:
                out.append(envelope.frames(first))
            envelope = filling[receiver] = _Envelope()
        envelope.add(frames, header, nbytes)
    out += [envelope.frames(first) for envelope in filling.values()]
    return out


def _may_be_enclosed(frames: Sequence[Buffer], first: int) -> bool:
    """Return whether these are the frames of one message of this protocol, and not too many."""
    return (
        2 <= len(frames) - first < 2 + len(_BEHIND)
        and frames[first] == PRELUDE
        and len(frames[first + 1]) > 0
        and frames[first + 1][0] in _MAPS
    )


def open_envelope(frames: Sequence[Buffer]) -> list[Sequence[Buffer]]:
    """Return the frames of each message in an envelope; frames without an envelope are one message.

    Raises:
        VersionMismatch, LimitExceeded, Malformed: the envelope is unusable, or its number of frames is wrong.
    """
    if len(frames) < 2 or not frames[1] or frames[1][0] not in _ARRAYS:
        return [frames]
    check_frames(frames)
    try:
        entries = _decoder.decode(frames[1])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"envelope: {short_error(error)}") from None
    messages: list[Sequence[Buffer]] = []
    at = 2
    for behind, header in entries:
        messages.append([frames[0], bytes(header), *frames[at : at + behind]])
        at += behind
    if at != len(frames):
        raise Malformed(f"envelope: speaks of {at - 2} frames behind its header, {len(frames) - 2} are there")
    return messages


def messages_in(frames: Sequence[Buffer], sender: str) -> Iterator[tuple[AnyMessage, list[bytes]]]:
    """Yield each message from ``sender`` with the frames behind its header.

    Messages that cannot be decoded are logged and left out.
    """
    try:
        for one in open_envelope(frames):
            try:
                message, rest = decode(one)
            except ProtocolError as error:
                log.error("message from %s refused: %s", sender, error)
                continue
            yield message, list(rest)  # type: ignore[arg-type]
    except ProtocolError as error:
        log.error("messages from %s refused: %s", sender, error)
