"""Whatever is appended, flushed, rotated, released and cut off, a recovery reads a beginning of it.

This beginning holds every record that was durable.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from broker.journal.claim import read_mark
from broker.journal.files import numbers
from broker.journal.journal import Journal
from broker.journal.writer import Header, Kind, file_name, pack_header
from tests.journals import DEADLINE_S, small
from tests.property.effort import EFFORT

KINDS = st.sampled_from([Kind.EVENT, Kind.SEGMENT, Kind.DEAD])
SHARES = st.floats(0, 1)
"""Shares in place of byte counts, because a thread's progress differs when hypothesis replays an example."""
KEEP = 600


@dataclass
class History:
    """Records that were appended since a snapshot (or since the beginning)."""

    before: int
    """Number that turns the process's count of records into an index of `said`, by addition."""
    said: list = field(default_factory=list)
    """Kind, payload and place of each record."""
    sure: int = 0
    """Number of these records that were durable."""


class JournalMachine(RuleBasedStateMachine):
    """A journal, and a model of what it must hold."""

    def __init__(self):
        super().__init__()
        self.tmp = tempfile.TemporaryDirectory()
        self.folder = Path(self.tmp.name) / "journal"
        self.histories = [History(0)]
        self.segments = {}
        """Payloads of the needed segments, by place."""
        self.journal = None

    @initialize(durability=st.sampled_from(["written", "synced"]))
    def start(self, durability):
        self.config = small(durability=durability, sync_interval_s=1e6, file_bytes=4096, keep_bytes=KEEP)
        self.journal = Journal.open(self.folder, run="run", config=self.config)

    def note_durable(self):
        assert self.journal.durable <= self.journal.sequence
        for history in self.histories:
            reached = min(self.journal.durable + history.before, len(history.said))
            history.sure = max(history.sure, reached)

    @rule(kind=KINDS, parts=st.lists(st.binary(max_size=40), max_size=3), needed=st.booleans())
    def append(self, kind, parts, needed):
        place = self.journal.append(kind, *parts)
        self.histories[-1].said.append((kind, b"".join(parts), place))
        if needed:
            self.segments[place] = b"".join(parts)

    @rule()
    def flush(self):
        self.journal.flush()
        if self.config.durability == "written":
            assert self.journal.durable == self.journal.sequence
        self.note_durable()

    @rule()
    def sync(self):
        assert self.journal.sync(DEADLINE_S)
        assert self.journal.durable == self.journal.sequence
        self.note_durable()

    @rule(payload=st.binary(max_size=40))
    def rotate(self, payload):
        before = -self.journal.sequence
        place = self.journal.rotate(payload)
        self.histories.append(History(before, [(Kind.SNAPSHOT, payload, place)]))
        self.note_durable()

    @rule(keep=st.booleans())
    def retain(self, keep):
        newest = self.histories[-1].said
        current = newest[0][2].file if newest and newest[0][0] is Kind.SNAPSHOT else 0
        if not keep:
            self.segments = {place: data for place, data in self.segments.items() if place.file >= current}
        needed = {place.file for place in self.segments}
        self.journal.retain(needed)
        if self.journal.sync(DEADLINE_S):
            self.journal.flush()
        self.note_durable()
        needless = [n for n in numbers(self.folder) if n < current and n not in needed]
        assert not needless or self.journal.nbytes <= KEEP
        assert needed <= set(numbers(self.folder))

    @rule(which=SHARES)
    def read(self, which):
        if self.segments:
            place = sorted(self.segments)[int(which * (len(self.segments) - 1))]
            assert self.journal.read(place) == self.segments[place]

    @rule()
    def closed(self):
        self.journal.close()
        for history in self.histories:
            history.sure = len(history.said)
        self.come_back()

    @rule(kept=SHARES)
    def killed(self, kept):
        """Kill the process: what was not durable may be gone, from any byte on."""
        self.note_durable()
        self.journal.abandon()
        last = max(numbers(self.folder))
        path = self.folder / file_name(last)
        sure = [record for history in self.histories for record in history.said[: history.sure]]
        ends = [place.offset + place.nbytes for _, _, place in sure if place.file == last]
        mark = read_mark(self.folder)
        head = len(pack_header(Header("run", 1, 0, 0))) if last <= mark.file else 0
        least = max([head, mark.bytes_of(last), *ends])
        with open(path, "r+b") as file:
            file.truncate(least + round(kept * (path.stat().st_size - least)))
        self.come_back()

    def come_back(self):
        self.journal = Journal.open(self.folder, run="run", config=self.config)
        assert self.journal.losses == []
        found = [(record.kind, record.payload, record.place) for record in self.journal.recovered()]
        which = max(i for i, history in enumerate(self.histories) if history.said[:1] == found[:1] or not i)
        history = self.histories[which]
        assert found == history.said[: len(found)]
        assert len(found) >= history.sure
        assert not any(later.sure for later in self.histories[which + 1 :])
        known = {place for _, _, place in found}
        self.histories = [History(len(found), found, len(found))]
        first = min((place.file for place in known), default=1)
        self.segments = {p: data for p, data in self.segments.items() if p in known or p.file < first}

    def teardown(self):
        if self.journal is not None:
            self.journal.close()
        self.tmp.cleanup()


test_journal = JournalMachine.TestCase
test_journal.settings = settings(max_examples=50 * EFFORT)
