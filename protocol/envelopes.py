"""Envelopes: what is said to one peer in one turn of a loop travels as one message of ZeroMQ.

A message costs ZeroMQ, CURVE and the kernel more than its bytes, so several leave together where several wait::

    frame 0   prelude
    frame 1   header: a MessagePack array of [frames behind its own header, message], one for each that is enclosed
    ...       their frames, in order

What waits alone leaves as it is, so nothing is slower where little is said.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from protocol.codec import MAX_FRAMES, MAX_HEADER_BYTES, PRELUDE, Buffer, check_frames, decode, said
from protocol.errors import Malformed, ProtocolError
from protocol.messages import AnyMessage

log = logging.getLogger(__name__)

MAX_ENCLOSED = 32
"""Messages in one envelope: what is handled at a time."""
MAX_ENVELOPE_BYTES = 1 << 20
"""Of what is put together; a larger message travels alone."""
ENVELOPE_HEADER_BYTES = 5
ENTRY_BYTES = 6

_ARRAYS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
"""First bytes of MessagePack arrays."""
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
    """Messages to one peer, one behind the other."""

    def __init__(self) -> None:
        self.messages: list[Sequence[Buffer]] = []
        self.nbytes = self.header_bytes = 0

    def takes(self, header: int, nbytes: int) -> bool:
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
        """As they leave; ``first``: frames before the prelude."""
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
    """Frames of messages, put into envelopes, in the order of what is said to each peer.

    Args:
        addressed: the routing id of its receiver stands before each message.

    Example:
        >>> from protocol.codec import decode, encode
        >>> from protocol.messages import Drain, TaskCredit
        >>> [envelope] = enclose([encode(TaskCredit(tasks=3)), encode(Drain())])
        >>> [decode(one)[0] for one in open_envelope(envelope)]
        [TaskCredit(tasks=3), Drain(reason='')]
    """
    if len(messages) < 2:  # the common case where little is said
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
    """Whether these are the frames of one message of ours, and not too many."""
    return (
        2 <= len(frames) - first < 2 + len(_BEHIND)
        and frames[first] == PRELUDE
        and len(frames[first + 1]) > 0
        and frames[first + 1][0] in _MAPS
    )


def open_envelope(frames: Sequence[Buffer]) -> list[Sequence[Buffer]]:
    """The frames of each message that came in one; without those of an envelope, what came.

    Raises:
        VersionMismatch, LimitExceeded, Malformed: the envelope is none, or its frames are not those it speaks of.
    """
    if len(frames) < 2 or not frames[1] or frames[1][0] not in _ARRAYS:
        return [frames]
    check_frames(frames)
    try:
        entries = _decoder.decode(frames[1])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"envelope: {said(error)}") from None
    messages: list[Sequence[Buffer]] = []
    at = 2
    for behind, header in entries:
        messages.append([frames[0], bytes(header), *frames[at : at + behind]])
        at += behind
    if at != len(frames):
        raise Malformed(f"envelope: speaks of {at - 2} frames behind its header, {len(frames) - 2} are there")
    return messages


def messages_in(frames: Sequence[Buffer], sender: str) -> Iterator[tuple[AnyMessage, list[bytes]]]:
    """What ``sender`` has said, each with the frames behind it; what cannot be decoded is logged and left out."""
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
