"""Fuzz the journal's folder: opening it must return what was written, or raise JournalError.

An input is a list of changes to the folder of a small journal that a broker has written. Bytes of files are
flipped, cut or moved. Files are removed, renamed or added. Records get a different payload with a right
checksum, as another version of the program might leave them.
"""

import os
import random
import shutil
import tempfile
import weakref
from pathlib import Path

import msgspec

from benchmarks.fuzz.engine import Choices, mutate_bytes, mutate_value
from benchmarks.fuzz.journal_sample import CONFIG, write_sample
from benchmarks.fuzz.messages import group
from broker.config import BrokerConfig
from broker.core.dispatch import Dispatcher
from broker.errors import JournalError
from broker.journal.claim import LOCK, Mark, pack_mark
from broker.journal.journal import Journal
from broker.journal.opening import ACCEPTED, records, survey
from broker.journal.records import (
    FoundRecord,
    Header,
    Kind,
    Loss,
    Record,
    pack_header,
    record_head,
    scan,
    unpack_dead_letter,
    unpack_header,
)
from broker.recovery import JournalStore, recover, snapshot
from protocol.codec import encode
from protocol.messages.episodes import DeliveryCredit, PutTasks
from protocol.messages.peers import Hello

SHARED_MEMORY = Path("/dev/shm")
NAMES = (
    "journal-00000001.log", "journal-00000002.log", "journal-00000003.log", "journal-00000004.log",
    "journal-00000001.released", "journal-00000002.released", "journal-99999999.log", "journal-99999999.released",
    "journal-.log", "journal-00000000.log", "journal-1.log", "journal-٣.log", "journal-00000002.log.partial",
    LOCK, ACCEPTED,
)  # fmt: skip
TEXTS = (
    b"",
    b"2\n",
    b"00000003\n",
    pack_mark(Mark(3, 200)),
    pack_mark(Mark(1, 1 << 40)),
    pack_mark(Mark(3, 200))[:-5] + b"0000\n",
    b"9" * 30,
    b"9" * 5000,
    b"-1",
    b"\xff\xfe",
    b"[]",
    b'[[1,0,5,1,"x",false]]',
    b"{",
    b"[1]",
)


class JournalTarget:
    """Target for the folder of a `broker.journal.journal`, and for `broker.recovery` from it."""

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
        store = JournalStore(journal, CONFIG.max_bytes)
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
