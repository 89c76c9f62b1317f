"""Bytes of the journal: file headers, records, and their payloads. Pure.

The format is in docs/understand/journal.md."""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

import msgspec
from msgspec import Struct

from broker.errors import JournalError
from protocol.codec import Buffer, decode_payload

FILE_MAGIC = b"OFFBEATJ"
FORMAT = 1
RECORD_MAGIC = b"\xf5OBr"
MAX_PAYLOAD_BYTES = (1 << 31) - 1

_FILE = struct.Struct("<8sHHIQQ")
_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<4sIIQB")
_COVERED = struct.Struct("<IQB")
_UNCOVERED = _HEAD.size - _COVERED.size
HEAD_BYTES = _HEAD.size


class Kind(IntEnum):
    """Kind of a record's payload."""

    SNAPSHOT = 1
    """The lasting state of the broker, without the bytes of segments."""
    EVENT = 2
    """One change of the state."""
    SEGMENT = 3
    """Header and body of a segment, as the actor sent them."""
    DEAD = 4
    """A message that could not be accepted."""


class Place(NamedTuple):
    """Place of a record's payload."""

    file: int
    offset: int
    nbytes: int


class Record(NamedTuple):
    """One record whose checksum was verified."""

    kind: Kind
    payload: bytes
    place: Place


class Header(NamedTuple):
    """Head of a file: run, file number, number of its first record, bytes of the file before it."""

    run: str
    file: int
    first: int
    previous_nbytes: int


class FoundRecord(NamedTuple):
    """A whole record found in a file; ``number`` counts all records of the journal from 0."""

    number: int
    kind: Kind
    place: Place


class Loss(NamedTuple):
    """Bytes that are not what was written. ``torn``: nothing whole follows, as after a writer was killed."""

    file: int
    offset: int
    nbytes: int
    records: int
    what: str
    torn: bool = False

    def __str__(self) -> str:
        return f"{file_name(self.file)}, byte {self.offset}: {self.what} ({self.records} records, {self.nbytes} bytes)"


_KINDS = {int(kind): kind for kind in Kind}


def file_name(number: int) -> str:
    """Return the name of a file.

    Example:
        >>> file_name(7)
        'journal-00000007.log'
    """
    return f"journal-{number:08d}.log"


# --- files --------------------------------------------------------------------------------------------------


def pack_header(header: Header) -> bytes:
    """Encode the head of a file."""
    run = header.run.encode()
    fixed = _FILE.pack(FILE_MAGIC, FORMAT, len(run), header.file, header.first, header.previous_nbytes)
    return fixed + run + _CRC.pack(crc32(fixed + run))


def unpack_header(data: bytes) -> tuple[Header, int] | None:
    """Return the head of a file and the offset of its first record; None if the head is cut or damaged.

    Raises:
        JournalError: another version of the program wrote the file.

    Example:
        >>> unpack_header(pack_header(Header("r", 3, 17, 4096)) + b"records")
        (Header(run='r', file=3, first=17, previous_nbytes=4096), 37)
    """
    if len(data) < _FILE.size:
        return None
    magic, version, length, file, first, previous = _FILE.unpack_from(data)
    end = _FILE.size + length
    if (
        magic != FILE_MAGIC
        or len(data) < end + _CRC.size
        or _CRC.unpack_from(data, end)[0] != crc32(data[:end])
    ):
        return None
    if version != FORMAT:
        raise JournalError(
            f"{file_name(file)}, byte 8: format {version}, this program reads {FORMAT}; use the version that wrote it"
        )
    # A name that cannot be decoded belongs to another run, whichever one.
    run = data[_FILE.size : end].decode(errors="backslashreplace")
    return Header(run, file, first, previous), end + _CRC.size


# --- records ------------------------------------------------------------------------------------------------


def record_head(kind: Kind, number: int, parts: tuple[Buffer, ...]) -> bytes:
    """Return the bytes that precede a payload made of ``parts``.

    Raises:
        JournalError: the payload is too long.
    """
    nbytes = sum(map(len, parts))
    if nbytes > MAX_PAYLOAD_BYTES:
        raise JournalError(f"{kind.name} of {nbytes} bytes, a record holds at most {MAX_PAYLOAD_BYTES}")
    check = crc32(_COVERED.pack(nbytes, number, kind))
    for part in parts:
        check = crc32(part, check)
    return _HEAD.pack(RECORD_MAGIC, check, nbytes, number, kind)


def record_at(data: bytes, offset: int) -> tuple[int, Kind, int] | None:
    """Return number, kind and end of the record at this offset; None if no whole record begins there."""
    if offset + HEAD_BYTES > len(data):
        return None
    magic, check, nbytes, number, code = _HEAD.unpack_from(data, offset)
    end, kind = offset + HEAD_BYTES + nbytes, _KINDS.get(code)
    if magic != RECORD_MAGIC or kind is None or end > len(data):
        return None
    if crc32(memoryview(data)[offset + _UNCOVERED : end]) != check:
        return None
    return number, kind, end


def payload_at(data: bytes, place: Place) -> bytes:
    """Return the payload from the bytes of a record, head included.

    Raises:
        JournalError: the bytes are not what was written.
    """
    found = record_at(data, 0)
    if found is None or found[2] != HEAD_BYTES + place.nbytes:
        what = "no record" if found is None and not data else "a record whose checksum does not match"
        raise JournalError(
            str(Loss(place.file, place.offset - HEAD_BYTES, HEAD_BYTES + place.nbytes, 1, what))
        )
    return data[HEAD_BYTES:]


def scan(data: bytes, file: int, offset: int, number: int | None = None) -> Iterator[FoundRecord | Loss]:
    """Yield the records from ``offset`` on, and the damage among them.

    ``number``: the number that the first record must have; None: any number.
    """
    while offset < len(data):
        found = record_at(data, offset)
        if found is not None and number in (None, found[0]):
            yield FoundRecord(
                found[0], found[1], Place(file, offset + HEAD_BYTES, found[2] - offset - HEAD_BYTES)
            )
            number, offset = found[0] + 1, found[2]
            continue
        loss, number = _loss(data, file, offset, number)
        yield loss
        offset += loss.nbytes


def _loss(data: bytes, file: int, offset: int, number: int | None) -> tuple[Loss, int | None]:
    """Return the damage that begins at ``offset``, and the number of the record that follows it."""
    place, whole = offset, False
    while (place := data.find(RECORD_MAGIC, place)) >= 0:
        found = record_at(data, place)
        if found is not None and (number is None or found[0] >= number):
            lost = 1 if number is None else found[0] - number
            return Loss(file, offset, place - offset, lost, _what(data, offset)), found[0]
        whole = whole or found is not None
        place += 1
    torn = not whole
    return Loss(file, offset, len(data) - offset, 1, _what(data, offset), torn), number


def _what(data: bytes, offset: int) -> str:
    head = data[offset : offset + HEAD_BYTES]
    if len(head) < HEAD_BYTES:
        return "a record that is cut"
    magic, _, nbytes, number, code = _HEAD.unpack(head)
    if magic != RECORD_MAGIC or code not in _KINDS:
        return "no record where one must begin"
    if record_at(data, offset) is not None:
        return f"record {number} is out of order, others are missing"
    if offset + HEAD_BYTES + nbytes > len(data):
        return "a record that is cut"
    return "a record whose checksum does not match"


# --- payloads -----------------------------------------------------------------------------------------------


def pack_segment(header: bytes, body: Buffer) -> tuple[bytes, bytes, Buffer]:
    """Return the parts of a SEGMENT's payload.

    Example:
        >>> unpack_segment(b"".join(pack_segment(b"header", b"body")))
        (b'header', b'body')
    """
    return _CRC.pack(len(header)), header, body


def unpack_segment(payload: bytes) -> tuple[bytes, bytes]:
    """Return header and body of a SEGMENT.

    Raises:
        JournalError: the payload is too short.
    """
    if len(payload) < _CRC.size:
        raise JournalError(f"a segment of {len(payload)} bytes")
    end = _CRC.size + _CRC.unpack_from(payload)[0]
    return payload[_CRC.size : end], payload[end:]


class DeadLetter(Struct, frozen=True):
    """A message that could not be accepted: who sent it, why it was refused, and its raw frames."""

    peer: str
    code: str
    reason: str
    frames: list[bytes]
    """The first bytes of the message, in its frames."""
    nbytes: int = 0
    """Bytes of the whole message; 0 in letters of earlier versions."""
    digest: bytes = b""
    """Digest by which the broker knows the message again; empty in letters of earlier versions."""


_dead_letter = msgspec.msgpack.Decoder(DeadLetter)


def pack_dead_letter(letter: DeadLetter) -> bytes:
    """Encode the payload of a DEAD record.

    Example:
        >>> unpack_dead_letter(pack_dead_letter(DeadLetter("a", "malformed", "no map", [b"x"]))).frames
        [b'x']
    """
    return msgspec.msgpack.encode(letter)


def unpack_dead_letter(payload: bytes) -> DeadLetter:
    """Decode the payload of a DEAD record.

    Raises:
        msgspec.MsgspecError: the payload is no dead letter.
    """
    return decode_payload(_dead_letter, payload)
