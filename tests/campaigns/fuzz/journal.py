"""Fuzz the journal: its folder, its files, and the payloads of its records.

Opening a folder must return what was written, or raise JournalError. A file or payload must be readable, or give a loss
or a JournalError. An input is one byte for the kind, one byte of flags, and the bytes to read: a file, a payload,
records to recover from, or a list of changes to the folder of a small journal that a broker has written. Bytes of files
are flipped, cut or moved there. Files are removed, renamed or added. Records get a different payload with a right
checksum, as another version of the program might leave them. Forged files have checksums that fit their content.
"""

import os
import random
import shutil
import tempfile
import weakref
from pathlib import Path
from zlib import crc32

import msgspec

from broker.config import BrokerConfig, JournalConfig
from broker.core.dispatch import Dispatcher
from broker.core.records import decode_event
from broker.core.state import BrokerState
from broker.errors import JournalError
from broker.journal.claim import LOCK, SECOND, Mark, boot_id, pack_mark, pack_written
from broker.journal.files import numbers
from broker.journal.journal import Journal
from broker.journal.opening import ACCEPTED, records, survey
from broker.journal.writer import (
    HEAD_BYTES,
    RECORD_MAGIC,
    DeadLetter,
    FoundRecord,
    Header,
    Kind,
    Loss,
    Place,
    Record,
    file_name,
    pack_dead_letter,
    pack_header,
    payload_at,
    record_head,
    scan,
    unpack_dead_letter,
    unpack_header,
    unpack_segment,
)
from broker.output_commit import JournalStore, poison_of, recover, snapshot
from protocol.codec import decode, encode, encode_arrays
from protocol.messages.episodes import Commit, DeliveryCredit, LeaseTask, PutTasks, TaskCredit
from protocol.messages.peers import Hello, PublishWeights
from tests.campaigns.fuzz.broker import MemoryJournal
from tests.campaigns.fuzz.engine import Choices, mutate_bytes, mutate_value
from tests.campaigns.fuzz.messages import arrays, evaluation, group, segment

CONFIG = JournalConfig(sync_interval_s=1e6, file_bytes=4096, keep_bytes=1 << 20, min_free_bytes=0)
WRITTEN_AT = 1_800_000_000.25
"""Wall clock of the sample, so that an input follows from seed and number."""


def write_sample(folder: Path) -> dict[str, bytes]:
    """Write the journal of a small run. Return its files: three logs, the later two with a snapshot."""
    journal = Journal.open(folder, run="r", config=CONFIG)
    store = JournalStore(journal, CONFIG.max_bytes, wall_clock=lambda: WRITTEN_AT)
    dispatcher = Dispatcher(
        BrokerConfig(journal=CONFIG), run="r", max_policy_lag=4, now=0.0, store=store, boot="1"
    )

    def say(name: str, frames: list[bytes]) -> list[LeaseTask]:
        message, _ = decode(frames)
        actions = dispatcher.handle(name, message, frames[1:], 0.0)
        return [action.message for action in actions if isinstance(action.message, LeaseTask)]

    say("L", encode(Hello(role="learner", peer="L", incarnation=1, epoch=1, lineage=1)))
    say("L", encode(DeliveryCredit(units=2)))
    say("L", encode(PublishWeights(epoch=1, version=1, manifest="m")))
    say("a", encode(Hello(role="actor", peer="a", incarnation=1)))
    say("a", encode(TaskCredit(tasks=100)))
    for step in range(3):
        leases = say("L", encode(PutTasks(tasks=[*group(f"1g{step}"), evaluation(f"e{step}")])))
        for lease in leases:
            for index, status in enumerate(("unfinished", "finished")):
                if step < 2 or not index:
                    one = segment(lease, index, 3 * index, tokens=3, status=status, version=1)
                    say("a", encode_arrays(one, arrays(3, 2, 1)))
        say("L", encode(Commit(epoch=1, step=step, trained=[f"1g{step}"])))
        letter = DeadLetter(peer="x", code="malformed", reason="no map", frames=[b"x"])
        journal.append(Kind.DEAD, pack_dead_letter(letter))
        if step < 2:
            journal.rotate(snapshot(dispatcher.state, store))
    assert journal.sync()
    journal.close()
    assert numbers(folder) == [1, 2, 3]
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {
        file_name(n): (folder / file_name(n)).read_bytes() for n in (1, 2, 3)
    }


SHARED_MEMORY = Path("/dev/shm")
NAMES = (
    "journal-00000001.log", "journal-00000002.log", "journal-00000003.log", "journal-00000004.log",
    "journal-00000001.released", "journal-00000002.released", "journal-99999999.log", "journal-99999999.released",
    "journal-.log", "journal-00000000.log", "journal-1.log", "journal-٣.log", "journal-00000002.log.partial",
    LOCK, SECOND, ACCEPTED,
)  # fmt: skip
TEXTS = (
    b"",
    b"2\n",
    b"00000003\n",
    pack_mark(Mark(3, 200)),
    pack_mark(Mark(1, 1 << 40)),
    pack_mark(Mark(3, 200))[:-5] + b"0000\n",
    pack_mark(Mark(3, 200)) + pack_written(Mark(3, 900), boot_id()),
    pack_mark(Mark(3, 200)) + pack_written(Mark(3, 1 << 40), b"an-earlier-boot"),
    b"9" * 30,
    b"9" * 5000,
    b"-1",
    b"\xff\xfe",
    b"[]",
    b'[[1,0,5,1,"x",false]]',
    b"{",
    b"[1]",
)


class FolderTarget:
    """Target for the folder of a `broker.journal.journal`, and for `broker.output_commit` from it."""

    name, unit = "journal", "opened"

    def __init__(self) -> None:
        self.done = 0
        where = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        root = tempfile.mkdtemp(prefix="fuzz-journal-", dir=where)
        weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        self._folder = Path(root) / "journal"
        self._files = write_sample(self._folder)
        self._logs = sorted(name for name in self._files if name.endswith(".log"))
        self._written: set[tuple[int, bytes]] = set()
        self._spans: dict[str, list[FoundRecord]] = {}
        for number, name in enumerate(self._logs, start=1):
            head = unpack_header(self._files[name])
            assert head is not None
            found = list(scan(self._files[name], number, head[1], head[0].first))
            self._spans[name] = [item for item in found if isinstance(item, FoundRecord)]
            assert len(self._spans[name]) == len(found) > 0
            for entry in self._spans[name]:
                place = entry.place
                self._written.add((entry.kind, self._files[name][place.offset : place.offset + place.nbytes]))

    def logs(self) -> list[bytes]:
        """Return the contents of the log files as they were written."""
        return [self._files[name] for name in self._logs]

    def make(self, rng: random.Random) -> bytes:
        return rng.randbytes(8 + rng.getrandbits(6))

    def run(self, data: bytes) -> None:
        choices = Choices(data)
        files, forged = dict(self._files), False
        for _ in range(1 + choices.below(3)):
            match choices.below(8):
                case 0 | 1 | 2 | 3:
                    self._damage(choices, files)
                case 4:
                    self._rename(choices, files)
                case 5 | 6:
                    self._forge(choices, files)
                    forged = True
                case _:
                    files[choices.pick(NAMES)] = choices.pick((*TEXTS, *self._files.values()))
        self._pure(choices, files)
        self._write(files)
        self._look()
        self._open(choices, forged)

    # --- changes ------------------------------------------------------------------------------------------------

    def _damage(self, choices: Choices, files: dict[str, bytes]) -> None:
        name = choices.pick(sorted(files))
        content = files[name]
        # Damage near the end of a record is most likely to meet a special case.
        if choices.flag(4) and content:
            ends = [e.place.offset + e.place.nbytes for e in self._spans.get(name, [])] or [len(content)]
            place = max(0, choices.pick(ends) + choices.below(9) - 4)
            files[name] = (
                content[:place]
                if choices.flag()
                else content[:place] + choices.bytes(4) + content[place + 4 :]
            )
        else:
            rng = random.Random(int.from_bytes(choices.bytes(4), "little"))
            files[name] = rng.randbytes(rng.getrandbits(7)) if choices.flag(8) else mutate_bytes(rng, content)

    def _rename(self, choices: Choices, files: dict[str, bytes]) -> None:
        name, other = choices.pick(sorted(files)), choices.pick(NAMES)
        content = files[name] if choices.flag() else files.pop(name)
        if choices.flag(4):
            return
        files[other] = content

    def _forge(self, choices: Choices, files: dict[str, bytes]) -> None:
        """Forge a file's header, or a record's payload. The rest of the file stays the same."""
        name = choices.pick(self._logs)
        content = self._files[name]
        if choices.flag(8):
            run = choices.pick(("other", "", "é" * 300, "r\x00"))
            place = (
                choices.pick((0, 1, 2, 2**32 - 1)),
                choices.pick((0, 3, 2**63, 2**64 - 1)),
                choices.pick((0, 9, 2**64 - 1)),
            )
            files[name] = pack_header(Header(run, *place)) + content[choices.below(80) :]
            return
        entry = choices.pick(self._spans[name])
        start, end = entry.place.offset, entry.place.offset + entry.place.nbytes
        payload = content[start:end]
        kind = choices.pick(tuple(Kind)) if choices.flag(4) else entry.kind
        rng = random.Random(int.from_bytes(choices.bytes(4), "little"))
        try:
            if choices.flag(3) or entry.kind is Kind.SEGMENT:
                payload = mutate_bytes(rng, payload)
            else:
                payload = msgspec.msgpack.encode(mutate_value(rng.choice, msgspec.msgpack.decode(payload)))
        except (OverflowError, RecursionError, msgspec.MsgspecError):
            payload = b""
        head = record_head(kind, entry.number, (payload,))
        files[name] = content[: start - len(head)] + head + payload + content[end:]

    def _write(self, files: dict[str, bytes]) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        for name, content in files.items():
            (self._folder / name).write_bytes(content)

    # --- readers ------------------------------------------------------------------------------------------------

    def _pure(self, choices: Choices, files: dict[str, bytes]) -> None:
        """Scan the bytes of one file: they must be records and losses, one directly after the other."""
        content = files[choices.pick(sorted(files))]
        try:
            head = unpack_header(content)
        except JournalError:
            head = None
        at = head[1] if head else 0
        for item in scan(content, 1, at, head[0].first if head else None):
            if isinstance(item, Loss):
                assert item.offset == at, "a loss that is elsewhere"
                assert item.nbytes or item.records, "a loss of nothing"
                at += item.nbytes
            else:
                at = item.place.offset + item.place.nbytes
        assert at == len(content) or (head is not None and at == head[1]), (
            "bytes that are neither record nor loss"
        )
        try:
            unpack_dead_letter(content)
        except msgspec.MsgspecError:
            return

    def _look(self) -> None:
        """Read the folder without a lock, as `offbeat journal` does."""
        try:
            survey(self._folder)
            for item in records(self._folder):
                if isinstance(item, Record) and item.kind is Kind.DEAD:
                    unpack_dead_letter(item.payload)
        except (JournalError, msgspec.MsgspecError):
            return

    def _open(self, choices: Choices, forged: bool) -> None:
        accept = choices.flag()
        try:
            journal = Journal.open(self._folder, run="r", config=CONFIG, accept_loss=accept)
        except JournalError:
            return
        self.done += 1
        try:
            found = list(journal.recovered())
            known = (self._folder / ACCEPTED).exists()
            assert accept or forged or known or not journal.losses, "damage that nobody accepted"
            if not forged:
                self._check_written(found)
            self._recover(journal)
            place = journal.append(Kind.DEAD, b"more")
            journal.flush()
            assert journal.read(place) == b"more", "what was appended is not there"
        finally:
            journal.close()
        self._reopen(found)

    def _check_written(self, found: list[Record]) -> None:
        for record in found:
            assert (record.kind, record.payload) in self._written, "a record that nobody wrote"

    def _recover(self, journal: Journal) -> None:
        store = JournalStore(journal, CONFIG.max_bytes, wall_clock=lambda: WRITTEN_AT)
        dispatcher = Dispatcher(
            BrokerConfig(journal=CONFIG), run="r", max_policy_lag=4, now=0.0, store=store, boot="2"
        )
        try:
            recover(dispatcher.state, store, journal.recovered(), 0.0)
        except JournalError:
            return
        snapshot(dispatcher.state, store)
        self._go_on(dispatcher)

    def _go_on(self, dispatcher: Dispatcher) -> None:
        """Check that the recovered broker can go on working."""
        for message in (
            Hello(role="learner", peer="L", incarnation=9, epoch=9, lineage=1),
            DeliveryCredit(units=9),
        ):
            dispatcher.handle("L", message, [encode(message)[1]], 0.0)
        dispatcher.tick(100.0)
        for action in dispatcher.handle("L", PutTasks(tasks=group("9g9")), [], 100.0):
            encode(action.message)

    def _reopen(self, found: list[Record]) -> None:
        """Open the journal again: it must hold all records found before, and the appended one."""
        journal = Journal.open(self._folder, run="r", config=CONFIG)
        try:
            again = list(journal.recovered())
            assert again[: len(found)] == found, "the next process finds something else"
            assert again[-1].payload == b"more", "what was appended last is not there"
        finally:
            journal.close()


FILE_KIND, PAYLOAD_KIND, RECORDS_KIND, FOLDER_KIND = range(4)
FORGED, LOST, ALTERED = 1, 2, 4
KINDS = {int(kind): kind for kind in Kind}
FIXED_BYTES = 32
"""Bytes of a file's head before the run's name and the checksum."""


class JournalTarget:
    """Target for `broker.journal.journal`, its files and records, and for `broker.output_commit` from them."""

    name, unit = "journal", "read to the end"

    def __init__(self) -> None:
        self.done = 0
        self._folders = FolderTarget()
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
    store = JournalStore(journal, 1 << 30, wall_clock=lambda: WRITTEN_AT)  # type: ignore[arg-type]
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
