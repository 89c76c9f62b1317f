"""Bytes of the journal, and the writing of them to the disk in order.

File headers, records and their payloads come first, as pure functions; the format is in docs/understand/journal.md.
In mode "written" the caller of `flush` writes, and a thread syncs at intervals. In mode "synced" the thread
does both, and the records appended while it syncs are its next group. A group of records counts as written
only when all of its bytes are.
"""

import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

import msgspec
from msgspec import Struct

from broker.config import JournalConfig
from broker.errors import JournalError
from broker.journal.claim import Claim, Mark
from protocol.codec import Buffer, decode_payload
from protocol.files import sync_folder

log = logging.getLogger(__name__)

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


_LENGTH = struct.Struct("<I")
_TIMED_LENGTH = struct.Struct("<Id")
_TIMED = 1 << 31
"""Bit of the length of a segment's header that says that the time of arrival follows. No header is that long."""


def pack_segment(header: bytes, body: Buffer, at: float | None = None) -> tuple[bytes, bytes, Buffer]:
    """Return the parts of a SEGMENT's payload.

    Args:
        at: wall clock of the segment's arrival, in seconds since 1970 (UTC); None: nobody knows.

    Example:
        >>> unpack_segment(b"".join(pack_segment(b"header", b"body", 1.5)))
        (b'header', b'body')
    """
    size = len(header)
    return _LENGTH.pack(size) if at is None else _TIMED_LENGTH.pack(size | _TIMED, at), header, body


def unpack_segment(payload: bytes) -> tuple[bytes, bytes]:
    """Return header and body of a SEGMENT.

    Raises:
        JournalError: the payload is too short.
    """
    start, size, _ = _before_header(payload)
    return payload[start : start + size], payload[start + size :]


def arrival_of(payload: bytes) -> float | None:
    """Return when a SEGMENT arrived, in seconds since 1970; None in a journal of an earlier version.

    Raises:
        JournalError: the payload is too short.

    Example:
        >>> arrival_of(b"".join(pack_segment(b"h", b"b", 1.5))), arrival_of(b"".join(pack_segment(b"h", b"b")))
        (1.5, None)
    """
    return _before_header(payload)[2]


def _before_header(payload: bytes) -> tuple[int, int, float | None]:
    """Return where a segment's header begins, its length, and the time of its arrival."""
    if len(payload) >= _LENGTH.size:
        size: int = _LENGTH.unpack_from(payload)[0]
        if not size & _TIMED:
            return _LENGTH.size, size, None
        if len(payload) >= _TIMED_LENGTH.size:
            return _TIMED_LENGTH.size, size & ~_TIMED, _TIMED_LENGTH.unpack_from(payload)[1]
    raise JournalError(f"a segment of {len(payload)} bytes")


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


MAX_PARTS = os.sysconf("SC_IOV_MAX")
"""Upper limit of the buffers that one call writes without joining them first."""


@dataclass(slots=True)
class WriteGroup:
    """Whole records of one file, one after the other, that are written together."""

    file: int
    start: int
    parts: list[Buffer]
    nbytes: int
    last: int
    """Number of records appended when the group was last extended."""
    done: int = 0
    """Bytes written so far."""
    taken: bool = False
    """True while the group is being written, so that nothing is added to it."""

    @property
    def end(self) -> int:
        """One past the last byte of the group in its file."""
        return self.start + self.nbytes

    def extend(self, other: "WriteGroup") -> None:
        """Add the records of a group that follows this one in its file."""
        self.parts += other.parts
        self.nbytes += other.nbytes
        self.last = other.last

    def whole(self) -> bytes:
        """Return all bytes of the group in one piece."""
        if len(self.parts) > 1:
            self.parts = [b"".join(self.parts)]
        return bytes(self.parts[0])

    def write(self, fd: int) -> None:
        """Write the group to its place in the file ``fd``; after an error, go on where that came.

        Raises:
            OSError: the disk took nothing more.
        """
        parts = self.parts if not self.done else []
        for first in range(0, len(parts), MAX_PARTS):
            some = parts[first : first + MAX_PARTS]
            done = os.pwritev(fd, some, self.start + self.done)
            self.done += done
            if done < sum(map(len, some)):
                break
        # A full disk first writes less than it was given, and then fails.
        while self.done < self.nbytes:
            rest = memoryview(self.whole())[self.done :]
            self.done += os.pwrite(fd, rest, self.start + self.done)


class WriteQueue:
    """The groups that are not written yet. The broker's thread adds them; the thread that writes takes them.

    Args:
        guard: lock for what both threads use.
    """

    def __init__(self, guard: threading.Condition) -> None:
        self._guard = guard
        self._fresh: list[WriteGroup] = []
        """Groups added since the last `hand_over`; only the broker's thread uses them."""
        self._pending: deque[WriteGroup] = deque()
        """Groups handed over. Invariant: it changes only while the guard is held."""
        self.count = 0
        """Number of records added."""

    @property
    def pending(self) -> bool:
        """Whether a group that was handed over is not written yet."""
        return bool(self._pending)

    def add(self, file: int, start: int, parts: tuple[Buffer, ...], nbytes: int, records: int) -> None:
        """Add ``nbytes`` for this place of a file, after everything added before."""
        if not self._fresh or self._fresh[-1].file != file:
            self._fresh.append(WriteGroup(file, start, [], 0, self.count))
        group = self._fresh[-1]
        group.parts += parts
        group.nbytes += nbytes
        self.count += records
        group.last = self.count

    def hand_over(self) -> None:
        """Move the groups added since the last call to the pending ones."""
        if not self._fresh:
            return
        with self._guard:
            for group in self._fresh:
                last = self._pending[-1] if self._pending else None
                if last is None or last.taken or last.file != group.file:
                    self._pending.append(group)
                else:
                    last.extend(group)
        self._fresh = []

    def take_oldest(self) -> WriteGroup | None:
        """Return the oldest pending group, to which nothing is added any more; None if there is none."""
        with self._guard:
            if not self._pending:
                return None
            self._pending[0].taken = True
            return self._pending[0]

    def drop_oldest(self) -> None:
        """Drop the oldest pending group, because it is written. Hold the guard."""
        self._pending.popleft()

    def last_file(self, written: int) -> int:
        """Return the file of the newest pending group, or ``written`` if there is none. Hold the guard."""
        return self._pending[-1].file if self._pending else written

    def find(self, file: int, start: int, nbytes: int) -> bytes | None:
        """Return the bytes at this place if they are not written yet; otherwise None."""
        with self._guard:
            for group in (*self._pending, *self._fresh):
                if group.file == file and group.start <= start < group.end:
                    return group.whole()[start - group.start : start - group.start + nbytes]
        return None


RETRY_S = 0.5
JOIN_S = 30.0
MAX_UNSYNCED = 8
"""Upper limit of the files that wait for a sync by the thread. At the limit, the writer syncs and waits."""


class Writer:
    """Records on their way to the disk. All methods but those of the thread belong to the broker's thread."""

    def __init__(
        self,
        config: JournalConfig,
        claim: Claim,
        newest: int,
        start: int,
        header: bytes,
        on_durable: Callable[[], None],
    ) -> None:
        """Go on in the file ``newest`` at byte ``start``, or begin the file if there is a ``header``."""
        self._claim, self._folder, self._on_durable = claim, claim.folder, on_durable
        self._synced_mode, self._interval_s = config.durability == "synced", config.sync_interval_s
        self._guard = threading.Condition()
        """Lock for what both threads use.

        Invariant: `_open`, `_written`, `_at`, `_end`, `_synced`, `_requested`, `_closing` and the queue's pending
        groups change only while it is held.
        """
        self._queue = WriteQueue(self._guard)
        self._syncing = threading.Lock()
        self._open: list[tuple[int, int]] = []
        """Number and descriptor of each file that is not synced to its end; the last one is being written."""
        self._written = self._synced = 0
        self._blocked, self._retry_at, self._failure = "", 0.0, ""
        self._requested = self._closing = False
        self._at = self.durable_file = 0
        """Number of the file written to last, and of the newest file that the disk has from its beginning."""
        self._end = 0
        """Bytes of the file written to last, as far as it has whole groups."""
        self._mark_sync_at = 0.0
        self._begin(newest)
        if header:
            self.add(newest, 0, (header,), len(header), records=0)
            self._queue.hand_over()
            self._write()
        else:
            self._at, self._end = newest, start
            self._note_written()
        self._sync()
        self._syncer = threading.Thread(target=self._work, name="journal", daemon=True)
        self._syncer.start()

    # --- from the broker's thread -------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of records added."""
        return self._queue.count

    @property
    def durable(self) -> int:
        """Number of records that are safe, counted from the first one without a gap."""
        return self._synced if self._synced_mode else self._written

    @property
    def synced(self) -> int:
        """Number of records that the disk has, counted from the first one without a gap."""
        return self._synced

    @property
    def blocked(self) -> str:
        """Reason why nothing can be written now; "" if writing works."""
        return self._blocked

    def add(self, file: int, start: int, parts: tuple[Buffer, ...], nbytes: int, records: int = 1) -> None:
        """Add ``nbytes`` for this place of a file, after everything added before."""
        self._queue.add(file, start, parts, nbytes, records)

    def flush(self) -> None:
        """Write what was added, or have the thread write it. A failed write is tried again after `RETRY_S`.

        Raises:
            JournalError: the disk did not keep data that it had accepted, or the thread failed.
        """
        if self._failure:
            raise JournalError(self._failure)
        self._queue.hand_over()
        if self._synced_mode:
            self._request()
        elif self._queue.pending and time.monotonic() >= self._retry_at:
            self._write()

    def find(self, file: int, start: int, nbytes: int) -> bytes | None:
        """Return the bytes at this place if they are not written yet; otherwise None."""
        return self._queue.find(file, start, nbytes)

    def sync(self, timeout_s: float) -> bool:
        """Wait until the disk has everything; return False if that takes longer than ``timeout_s``."""
        self.flush()
        with self._guard:
            wanted, file = self._queue.count, self._queue.last_file(self._at)
            self._requested = True
            self._guard.notify_all()
            self._guard.wait_for(lambda: self._has(wanted, file) or self._failure != "", timeout_s)
            return self._has(wanted, file)

    def _has(self, count: int, file: int) -> bool:
        return self._synced >= count and self.durable_file >= file

    def close(self, *, write: bool = True) -> None:
        """Write and sync what is left, as far as the disk takes it.

        Without ``write``, end as a killed process does: nothing more is written.
        """
        with self._guard:
            self._closing = True
            self._guard.notify_all()
        self._syncer.join(JOIN_S)
        # Invariant: the files stay open while the thread may use them.
        if self._syncer.is_alive():
            log.error("journal: the disk has not answered for %d s", JOIN_S)
            return
        try:
            if write and not self._failure:
                self._queue.hand_over()
                self._write()
                self._sync()
        except JournalError as error:
            self._failure = str(error)
        finally:
            for _, fd in self._open:
                os.close(fd)
        if write and (self._failure or self._queue.pending):
            left = self.count - self.durable
            log.error("journal: %d records are not safe: %s", left, self._failure or self._blocked)

    def _request(self) -> None:
        with self._guard:
            if self._queue.pending:
                self._requested = True
                self._guard.notify_all()

    # --- writing: by the broker's thread, or by the journal's in mode "synced" -----------------------------

    def _write(self) -> None:
        try:
            while (group := self._queue.take_oldest()) is not None:
                if not self._open or group.file != self._open[-1][0]:
                    self._begin(group.file)
                self._write_group(group, self._open[-1][1])
        except OSError as error:
            # A group that is not written stays pending, and is written to the same place later.
            self._retry_at = time.monotonic() + RETRY_S
            self._blocked = self._blocked or f"{error.strerror} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        else:
            self._blocked, self._retry_at = "", 0.0

    def _begin(self, file: int) -> None:
        if len(self._open) >= MAX_UNSYNCED:
            self._sync()
        path = self._folder / file_name(file)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self._guard:
            self._open.append((file, fd))

    def _write_group(self, group: WriteGroup, fd: int) -> None:
        group.write(fd)
        with self._guard:
            self._queue.drop_oldest()
            self._written, self._at, self._end = group.last, group.file, group.end
        self._note_written()

    def _note_written(self) -> None:
        """Say how much the operating system has, where the broker answers on the strength of that."""
        if not self._synced_mode:
            self._claim.mark_written(Mark(self._at, self._end))

    # --- the thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._wait():
                if self._synced_mode and self._queue.pending and time.monotonic() >= self._retry_at:
                    self._write()
                if self._sync() and self._synced_mode:
                    self._on_durable()
        except Exception as error:
            # Whatever the error is, the broker must not wait for this thread any more.
            with self._guard:
                self._failure = (
                    str(error) if isinstance(error, JournalError) else f"the journal's thread: {error!r}"
                )
                self._guard.notify_all()
            self._on_durable()

    def _wait(self) -> bool:
        """Wait for a request or the next interval; return False when the writer is closing."""
        with self._guard:
            if not self._requested and not self._closing:
                idle = None if not self._queue.pending else RETRY_S
                self._guard.wait(idle if self._synced_mode else self._interval_s)
            self._requested = False
            return not self._closing

    def _sync(self) -> bool:
        """Have the disk take what is written; return whether the disk has more records than before.

        Raises:
            JournalError: the disk failed. Do not sync again: the disk might then report lost data as kept.
        """
        try:
            with self._syncing:
                return self._sync_files()
        except OSError as error:
            raise JournalError(self._describe(error)) from error

    def _sync_files(self) -> bool:
        with self._guard:
            reached, files = self._written, list(self._open)
            at, end = self._at, self._end
        if reached == self._synced and at == self.durable_file:
            return False
        self._claim.check_folder()
        # Older files first, so that the disk has no record without those before it.
        for _, fd in files:
            os.fdatasync(fd)
        began = at != self.durable_file
        if began:
            sync_folder(self._folder)
        self._mark(Mark(at, end), sync=began)
        self.durable_file = at
        with self._guard:
            for _, fd in files[:-1]:
                os.close(fd)
            self._open = self._open[len(files) - 1 :]
            rose, self._synced = reached > self._synced, reached
            self._guard.notify_all()
        return rose

    def _mark(self, mark: Mark, *, sync: bool) -> None:
        """Mark what the disk has. The mark is synced at intervals, because each sync makes answers wait."""
        now = time.monotonic()
        sync = sync or now >= self._mark_sync_at
        self._claim.mark_synced(mark, sync=sync)
        if sync:
            self._mark_sync_at = now + self._interval_s

    def _describe(self, error: OSError) -> str:
        place = file_name(self._open[-1][0]) if self._open else ""
        return (
            f"{self._folder / place}: {error.strerror}: the disk did not keep what it had taken; start the broker "
            "again, on another disk if this is repeated"
        )
