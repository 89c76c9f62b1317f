"""What a campaign is judged by, read from outside: actors' logs, the journal's files, the books they lead to."""

import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker.books import Books
from broker.config import BrokerConfig
from broker.events import Committed, LearnerJoined, decode_event
from broker.journal import Journal
from broker.journal_config import JournalConfig
from broker.journal_files import records
from broker.journal_records import Kind, Loss, unpack_segment
from broker.recovery import JournalStore, recover
from protocol.codec import decode_segment

ACKNOWLEDGED = re.compile(r"segment (\d+) of (\S+): stored")


@dataclass
class Proof:
    """Counts over a whole campaign."""

    acknowledged: int = 0
    """Segments that an actor was told are stored."""
    lost: list[tuple[str, int]] = field(default_factory=list)
    """Of these, the ones the journal does not have."""
    steps: int = 0
    """Of the line of steps that survived."""
    units_trained: int = 0
    trained_twice: list[str] = field(default_factory=list)
    """Units that entered the gradient of two steps of that line."""
    rolled_back: int = 0
    """Units trained at steps that a killed learner took with it."""
    damaged_records: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    """Segments by what became of them."""
    held: int = 0
    violation: str = ""


def acknowledged(logs: Path) -> set[tuple[str, int]]:
    """Segments that actors were told are stored."""
    found = set()
    for path in logs.glob("actor*.log"):
        for match in ACKNOWLEDGED.finditer(path.read_text(errors="replace")):
            found.add((match[2], int(match[1])))
    return found


class Line:
    """The line of steps that leads to the newest checkpoint and on, as the journal's events tell it."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.twice: list[str] = []
        self.rolled_back = 0
        self._process: tuple[int, int] | None = None

    def happened(self, event: object) -> None:
        match event:
            case LearnerJoined(hello=hello):
                if self._process not in (None, (hello.epoch, hello.incarnation)):
                    gone = [unit for unit, step in self.steps.items() if step > hello.step]
                    self.rolled_back += len(gone)
                    for unit in gone:
                        del self.steps[unit]
                self._process = (hello.epoch, hello.incarnation)
            case Committed(step=step, trained=trained):
                for unit in trained:
                    if self.steps.setdefault(unit, step) != step:
                        self.twice.append(unit)


def prove(folder: Path) -> Proof:
    """Read all of a run that has ended."""
    said, line, proof = acknowledged(folder / "logs"), Line(), Proof()
    stored: set[tuple[str, int]] = set()
    for record in records(folder / "journal"):
        if isinstance(record, Loss):
            proof.damaged_records += not record.torn
        elif record.kind is Kind.SEGMENT:
            segment = decode_segment(unpack_segment(record.payload)[0])
            stored.add((segment.trajectory_id, segment.index))
        elif record.kind is Kind.EVENT:
            line.happened(decode_event(record.payload))
    proof.acknowledged, proof.lost = len(said), sorted(said - stored)
    proof.steps, proof.units_trained = len(set(line.steps.values())), len(line.steps)
    proof.trained_twice, proof.rolled_back = line.twice, line.rolled_back
    _books(folder, proof)
    return proof


def _books(folder: Path, proof: Proof) -> None:
    """Take the journal up as a broker would, in a copy."""
    with tempfile.TemporaryDirectory() as copy:
        for path in (folder / "journal").iterdir():
            (Path(copy) / path.name).write_bytes(path.read_bytes())
        config = JournalConfig()
        journal = Journal.open(Path(copy), run=folder.name, config=config, accept_loss=True)
        store = JournalStore(journal, config.max_bytes)
        books = Books(BrokerConfig(), store, 1 << 30)
        recover(books, store, journal.recovered(), now=0.0)
        proof.violation, proof.held = books.violation(), len(store)
        proof.outcomes = {name: t.segments for name, t in books.ledger.outcomes.items() if t.segments}
        journal.close()


def summary(results: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of the table: kind, injected, recovered, seconds to recover (median, worst)."""
    rows = []
    kinds = Counter(result["kind"] for result in results)
    for kind in sorted(kinds):
        seconds = sorted(r["seconds"] for r in results if r["kind"] == kind and r["recovered"])
        median = f"{seconds[len(seconds) // 2]:.1f}" if seconds else "-"
        worst = f"{seconds[-1]:.1f}" if seconds else "-"
        rows.append([kind, str(kinds[kind]), str(len(seconds)), median, worst])
    return rows
