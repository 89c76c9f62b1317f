"""Encode messages as frames, and decode them.

Layout of a multipart message::

    frame 0   prelude: b"OB", major (u8), minor (u8)
    frame 1   header: one message as a MessagePack map (an array: see `protocol.envelopes`)
    frame 2   body: the header's arrays, raw little-endian, 8-byte aligned  (only if the message has arrays)
    ...       Deliver only: (header, body) of each segment it carries

The prelude is read before anything is decoded, so that a different major version is refused with a clear
error. Sizes are also checked before decoding.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.arrays import ITEM_BYTES, Arrays, SegmentArrays
from protocol.errors import LimitExceeded, Malformed, VersionMismatch
from protocol.messages.any_message import AnyMessage
from protocol.messages.array_specs import ArraySpec
from protocol.messages.delivery import Deliver
from protocol.messages.fields import MAX_ARRAYS
from protocol.messages.segments import Segment

MAJOR, MINOR = 4, 4
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
        >>> from protocol.messages.tasks import TaskCredit
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
