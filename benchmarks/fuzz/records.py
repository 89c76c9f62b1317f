"""Fuzz the journal's bytes: a file or payload must be readable, or give a loss or a JournalError.

An input is one byte for the kind, one byte of flags, and the bytes to read: a file, a payload, or records to
recover from. Some inputs are changes to a folder, for `benchmarks.fuzz.journal`. Forged files have checksums
that fit their content.
"""

import random
from zlib import crc32

import msgspec

from benchmarks.fuzz import journal as fuzz_journal
from benchmarks.fuzz.broker import MemoryJournal
from benchmarks.fuzz.engine import mutate_bytes, mutate_value
from broker.config import BrokerConfig
from broker.core.records import decode_event
from broker.core.state import BrokerState
from broker.errors import JournalError
from broker.journal.records import (
    HEAD_BYTES,
    RECORD_MAGIC,
    DeadLetter,
    FoundRecord,
    Kind,
    Loss,
    Place,
    Record,
    pack_dead_letter,
    payload_at,
    scan,
    unpack_dead_letter,
    unpack_header,
    unpack_segment,
)
from broker.recovery import JournalStore, poison_of, recover

FILE_KIND, PAYLOAD_KIND, RECORDS_KIND, FOLDER_KIND = range(4)
FORGED, LOST, ALTERED = 1, 2, 4
KINDS = {int(kind): kind for kind in Kind}
FIXED_BYTES = 32
"""Bytes of a file's head before the run's name and the checksum."""


class JournalTarget:
    """Target for `broker.journal.journal`, its files and records, and for `broker.recovery` from them."""

    name, unit = "journal", "read to the end"

    def __init__(self) -> None:
        self.done = 0
        self._folders = fuzz_journal.JournalTarget()
        self._logs = self._folders.logs()
        self._series = [_records(data) for data in self._logs]
        self._written = [record for series in self._series for record in series]
        self._payloads = {(record.kind, record.payload) for record in self._written}

    # --- inputs -----------------------------------------------------------------------------------------------

    def make(self, rng: random.Random) -> bytes:
        kind = rng.choice((FILE_KIND,) * 6 + (PAYLOAD_KIND,) * 5 + (RECORDS_KIND,) * 4 + (FOLDER_KIND,))
        flags = rng.getrandbits(3)
        match kind:
            case 0:
                data = self._make_file(rng, flags)
            case 1:
                data = _make_payload(rng, rng.choice(self._written))
            case 2:
                data = self._make_records(rng, flags)
            case _:
                data = self._folders.make(rng)
        return bytes((kind, flags)) + data

    def _make_file(self, rng: random.Random, flags: int) -> bytes:
        if not rng.getrandbits(4):
            return rng.randbytes(rng.getrandbits(7))
        data = mutate_bytes(rng, rng.choice(self._logs))
        return _forge(data) if flags & FORGED else data

    def _make_records(self, rng: random.Random, flags: int) -> bytes:
        """Return a journal's records without some. With ALTERED some are also repeated or changed."""
        written = rng.choice(self._series)
        series = [bytes([r.kind]) + r.payload for r in written]
        for _ in range(1 + rng.getrandbits(2)):
            at = rng.randrange(len(series))
            match rng.getrandbits(2):
                case 0 if flags & ALTERED:
                    series[at] = _make_payload(rng, rng.choice(written))
                case 1 if flags & ALTERED:
                    series[at:at] = [series[at], rng.choice(series)]
                case _:
                    del series[at : at + 1 + rng.getrandbits(1) * rng.getrandbits(3)]
            if not series:
                break
        return msgspec.msgpack.encode(series)

    # --- what must hold ------------------------------------------------------------------------------------------

    def run(self, data: bytes) -> None:
        kind, flags = (data[0] % 4, data[1]) if len(data) > 1 else (FILE_KIND, FORGED)
        content = data[2:]
        try:
            match kind:
                case 0:
                    self._read_file(content, forged=bool(flags & FORGED))
                case 1:
                    _read_payload(content)
                case 2:
                    _recover(msgspec.msgpack.decode(content, type=list[bytes]), flags)
                case _:
                    self._folders.run(content)
        except JournalError:
            return
        self.done += 1

    def _read_file(self, data: bytes, *, forged: bool) -> None:
        head = unpack_header(data)
        at = start = head[1] if head is not None else 0
        number = head[0].first if head is not None else 0
        for item in scan(data, 1, start, number if head is not None else None):
            if isinstance(item, Loss):
                assert item.offset == at, "a loss does not begin where the record before it ends"
                assert item.nbytes or item.records, "a loss of nothing"
                at += item.nbytes
                continue
            assert item.place.offset == at + HEAD_BYTES, (
                "a record does not begin where the one before it ends"
            )
            assert item.number >= number, "records are out of order"
            begin, at, number = at, item.place.offset + item.place.nbytes, item.number + 1
            payload = payload_at(data[begin:at], item.place)
            known = (item.kind, payload) in self._payloads
            assert forged or known, "a record is read that was not written"
        assert at == max(start, len(data)), "not all of the file was looked at"


def _records(data: bytes) -> list[Record]:
    """Return the records of an undamaged file."""
    head = unpack_header(data)
    assert head is not None
    found = [item for item in scan(data, 1, head[1], head[0].first) if isinstance(item, FoundRecord)]
    return [Record(e.kind, data[e.place.offset : e.place.offset + e.place.nbytes], e.place) for e in found]


def _make_payload(rng: random.Random, record: Record) -> bytes:
    kind, payload = record.kind, record.payload
    if not rng.getrandbits(3):
        kind, payload = Kind.DEAD, pack_dead_letter(DeadLetter("a", "malformed", "no map", [b"x", b""]))
    if kind is not Kind.SEGMENT and rng.getrandbits(1):
        try:
            payload = msgspec.msgpack.encode(mutate_value(rng.choice, msgspec.msgpack.decode(payload)))
        except (OverflowError, RecursionError):
            payload = payload[:-1]
    else:
        payload = mutate_bytes(rng, payload)
    return bytes([kind]) + payload


def _read_payload(content: bytes) -> None:
    kind, payload = content[0] if content else 0, content[1:]
    try:
        match kind:
            case Kind.SNAPSHOT:
                poison_of(Record(Kind.SNAPSHOT, payload, Place(1, 0, len(payload))))
            case Kind.SEGMENT:
                unpack_segment(payload)
            case Kind.DEAD:
                unpack_dead_letter(payload)
            case _:
                decode_event(payload)
    except msgspec.MsgspecError:
        return


def _recover(series: list[bytes], flags: int) -> None:
    """Recover a broker from records. With LOST the journal reports damage that was accepted.

    Unless records were altered, the ledger must close.
    """
    found = [
        Record(KINDS.get(item[0] if item else 0, Kind.DEAD), item[1:], Place(1, i, max(0, len(item) - 1)))
        for i, item in enumerate(series)
    ]
    journal = MemoryJournal(found)
    if flags & LOST:
        journal.losses = [Loss(1, 0, 1, 1, "lost")]
    store = JournalStore(journal, 1 << 30)  # type: ignore[arg-type]
    state = BrokerState(BrokerConfig(), store, 4, "2")
    recover(state, store, found, 1000.0)
    assert flags & ALTERED or state.violation() == "", f"the ledger does not close: {state.violation()}"


def _forge(data: bytes) -> bytes:
    """Correct the checksums of the head and the records, where their lengths fit into the data."""
    out = bytearray(data)
    end = FIXED_BYTES + int.from_bytes(out[10:12], "little")
    if len(out) >= end + 4:
        out[end : end + 4] = crc32(out[:end]).to_bytes(4, "little")
    at = out.find(RECORD_MAGIC)
    while at >= 0:
        end = at + HEAD_BYTES + int.from_bytes(out[at + 8 : at + 12], "little")
        if end <= len(out):
            out[at + 4 : at + 8] = crc32(out[at + 8 : end]).to_bytes(4, "little")
        at = out.find(RECORD_MAGIC, at + 1)
    return bytes(out)
