"""Encode messages as frames, and decode them; several messages to one peer travel as one envelope."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.arrays import ITEM_BYTES, Arrays, SegmentArrays
from protocol.errors import LimitExceeded, Malformed, ProtocolError, VersionMismatch
from protocol.messages.episodes import (
    CancelTask,
    Checkpointed,
    CheckpointWanted,
    Commit,
    Deliver,
    DeliveryCredit,
    Dropped,
    Held,
    LeaseTask,
    PutTasks,
    Segment,
    SegmentAck,
    SegmentCredit,
    TaskCredit,
    TaskRejected,
)
from protocol.messages.fields import MAX_ARRAYS, ArraySpec
from protocol.messages.peers import (
    Abort,
    ActorKeys,
    Chunk,
    Drain,
    Echo,
    Generate,
    Generators,
    Goodbye,
    Heartbeat,
    Hello,
    PublishWeights,
    QueueStats,
    Refused,
    Stay,
    WeightsReady,
    Welcome,
)

log = logging.getLogger(__name__)

AnyMessage = (
    Hello | Heartbeat | Goodbye | PutTasks | DeliveryCredit | Commit | Checkpointed | PublishWeights | TaskCredit
    | Segment | TaskRejected | Welcome | Refused | Generators | LeaseTask | CancelTask | SegmentAck | SegmentCredit
    | Held | CheckpointWanted | Deliver | Dropped | WeightsReady | ActorKeys | Drain | QueueStats | Generate | Abort
    | Stay | Chunk | Echo
)  # fmt: skip


MAJOR, MINOR = 4, 8
PRELUDE = b"OB" + bytes((MAJOR, MINOR))

MAX_HEADER_BYTES = 256 * 1024
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MAX_FRAMES = 65_536
MAX_QUOTED = 500

Frames = list[bytes]
Buffer = bytes | memoryview

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_segment_decoder = msgspec.msgpack.Decoder(Segment)

M = TypeVar("M", bound=msgspec.Struct)
T = TypeVar("T")


def pack_arrays(arrays: Mapping[str, NDArray[Any]]) -> tuple[list[ArraySpec], bytes]:
    """Pack one-dimensional arrays into one body, each at a multiple of 8 bytes.

    Returns:
        The description of each array, and the body.

    Raises:
        ValueError: an array has a dtype or a number of dimensions that cannot travel.

    Example:
        >>> specs, body = pack_arrays({"token_ids": np.array([5, 7], dtype="<i4")})
        >>> specs[0].dtype, specs[0].length, body.hex()
        ('i4', 2, '0500000007000000')
    """
    specs: list[ArraySpec] = []
    pieces: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        code = f"{array.dtype.kind}{array.dtype.itemsize}"
        if code not in ITEM_BYTES or array.ndim != 1:
            raise ValueError(
                f"array {name!r}: dtype {array.dtype} with {array.ndim} dimensions cannot travel; "
                f"use one dimension of {sorted(ITEM_BYTES)}"
            )
        piece = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
        specs.append(ArraySpec(name, code, len(array), offset))  # type: ignore[arg-type]
        # Keep every array aligned for zero-copy views.
        piece += bytes(-len(piece) % 8)
        pieces.append(piece)
        offset += len(piece)
    return specs, b"".join(pieces)


def unpack_arrays(specs: Sequence[ArraySpec], body: Buffer) -> Arrays:
    """Return views (no copies) of the arrays in a body frame.

    Raises:
        LimitExceeded: there are more than `MAX_ARRAYS`.
        Malformed: an array does not fit into the body, or a name appears twice.
    """
    if len(specs) > MAX_ARRAYS:
        raise LimitExceeded(f"$.arrays: {len(specs)} arrays, at most {MAX_ARRAYS}")
    arrays: Arrays = {}
    for i, spec in enumerate(specs):
        end = spec.offset + spec.length * ITEM_BYTES[spec.dtype]
        if end > len(body):
            raise Malformed(
                f"$.arrays[{i}] ({spec.name!r}): ends at byte {end}, the body has {len(body)}; "
                "the message was cut or the header is wrong"
            )
        if spec.name in arrays:
            raise Malformed(f"$.arrays[{i}]: a second array {spec.name!r}")
        arrays[spec.name] = np.frombuffer(body, "<" + spec.dtype, spec.length, spec.offset)
    return arrays


def encode(message: AnyMessage, body: bytes | None = None) -> Frames:
    """Return the frames of one message; ``body`` is needed if its header describes arrays.

    Raises:
        LimitExceeded: header or body is too large.
    """
    header = _encoder.encode(message)
    if len(header) > MAX_HEADER_BYTES:
        raise LimitExceeded(
            f"{type(message).__name__}: header of {len(header)} bytes, at most {MAX_HEADER_BYTES}"
        )
    if body is None:
        return [PRELUDE, header]
    if len(body) > MAX_BODY_BYTES:
        raise LimitExceeded(f"{type(message).__name__}: body of {len(body)} bytes, at most {MAX_BODY_BYTES}")
    return [PRELUDE, header, body]


def encode_delivery(deliver: Deliver, segments: Sequence[tuple[bytes, Buffer]]) -> list[Buffer]:
    """Return the frames of a delivery; header and body bytes of the segments are passed on unchanged."""
    if len(segments) != deliver.segments:
        raise ValueError(f"Deliver announces {deliver.segments} segments, got {len(segments)}")
    return [PRELUDE, _encoder.encode(deliver), *(frame for pair in segments for frame in pair)]


def encode_arrays(message: M, arrays: Mapping[str, NDArray[Any]]) -> Frames:
    """Return the frames of a message that carries arrays, with its ``arrays`` field filled in."""
    specs, body = pack_arrays(arrays)
    return encode(msgspec.structs.replace(message, arrays=specs), body)  # type: ignore[arg-type]


def check_frames(frames: Sequence[Buffer]) -> None:
    """Refuse a message that is too large or of a different major version, before anything is decoded.

    Raises:
        VersionMismatch, LimitExceeded, Malformed: the text says what is wrong.
    """
    count, total = len(frames), sum(map(len, frames))
    if (
        total <= MAX_HEADER_BYTES
        and total <= MAX_BODY_BYTES
        and 2 <= count <= MAX_FRAMES
        and frames[0] == PRELUDE
    ):
        # The whole message is within the limits of a header and of a body, so each part of it is, too.
        return
    if count > MAX_FRAMES:
        raise LimitExceeded(f"message of {count} frames, at most {MAX_FRAMES}")
    if total > MAX_MESSAGE_BYTES:
        raise LimitExceeded(f"message of {total} bytes, at most {MAX_MESSAGE_BYTES}")
    if count < 2 or (
        frames[0] != PRELUDE and (len(frames[0]) != len(PRELUDE) or bytes(frames[0][:2]) != b"OB")
    ):
        raise Malformed("not an Offbeat message: frame 0 must be b'OB' + major + minor, frame 1 the header")
    if frames[0][2] != MAJOR:
        raise VersionMismatch(
            f"peer speaks protocol {frames[0][2]}.{frames[0][3]}, this process {MAJOR}.{MINOR}; "
            "run the same major version of offbeat everywhere"
        )
    if len(frames[1]) > MAX_HEADER_BYTES:
        raise LimitExceeded(f"header of {len(frames[1])} bytes, at most {MAX_HEADER_BYTES}")
    if total <= MAX_BODY_BYTES:
        return
    for i, frame in enumerate(frames[2:], start=2):
        if len(frame) > MAX_BODY_BYTES:
            raise LimitExceeded(f"frame {i} of {len(frame)} bytes, at most {MAX_BODY_BYTES}")


def decode(frames: Sequence[Buffer]) -> tuple[AnyMessage, Sequence[Buffer]]:
    """Return the message in the header and the frames behind it.

    Raises:
        VersionMismatch, LimitExceeded, Malformed: the text says where the message is wrong.

    Example:
        >>> from protocol.messages.episodes import TaskCredit
        >>> decode(encode(TaskCredit(tasks=3)))
        (TaskCredit(tasks=3, void=False), [])
    """
    check_frames(frames)
    try:
        return _decoder.decode(frames[1]), frames[2:]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"header: {short_error(error)}") from None


def short_error(error: Exception) -> str:
    """Return a decoder's error text, shortened: it may quote a value too long for a log or an answer."""
    text = str(error)
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}... ({len(text)} characters)"


def decode_segment(header: Buffer) -> Segment:
    """Decode the header of a segment that travels inside a delivery.

    Raises:
        LimitExceeded, Malformed: the header is too large, or is not one.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise LimitExceeded(f"segment header of {len(header)} bytes, at most {MAX_HEADER_BYTES}")
    try:
        return _segment_decoder.decode(header)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"segment header: {short_error(error)}") from None


def decode_delivery(deliver: Deliver, rest: Sequence[Buffer]) -> list[SegmentArrays]:
    """Return the segments of a delivery, with their arrays as views.

    Raises:
        LimitExceeded, Malformed: the text says which part is wrong.
    """
    if len(rest) != 2 * deliver.segments:
        raise Malformed(f"Deliver announces {deliver.segments} segments, {len(rest)} frames follow")
    pairs = zip(rest[::2], rest[1::2], strict=True)
    decoded = [(decode_segment(header), body) for header, body in pairs]
    return [SegmentArrays(segment, unpack_arrays(segment.arrays, body)) for segment, body in decoded]


def decode_payload(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    """Decode MessagePack that was written to a disk.

    Raises:
        msgspec.MsgspecError: the payload cannot be decoded. No other exception is raised.
    """
    try:
        return decoder.decode(payload)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


MAX_ENCLOSED = 32
"""Upper limit of the messages in one envelope, which the receiver handles at a time."""
MAX_ENVELOPE_BYTES = 1 << 20
"""Upper limit of the bytes in one envelope; a larger message travels alone."""
ENVELOPE_HEADER_BYTES = 5
ENTRY_BYTES = 6

_ARRAYS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
"""First bytes of MessagePack arrays, with which the header of an envelope begins."""
_MAPS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
_envelope_encoder = msgspec.msgpack.Encoder()
_BEHIND = tuple(b"\x92" + _envelope_encoder.encode(behind) for behind in range(64))
_envelope_decoder = msgspec.msgpack.Decoder(
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
        >>> from protocol.messages.episodes import TaskCredit
        >>> [envelope] = enclose([encode(TaskCredit(tasks=3)), encode(Drain())])
        >>> [decode(one)[0] for one in open_envelope(envelope)]
        [TaskCredit(tasks=3, void=False), Drain(reason='', then='')]
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
        entries = _envelope_decoder.decode(frames[1])
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
