"""Prove that a run lost nothing: read its actors' logs and its journal, and recover the broker's state.

    python -m benchmarks.faults.proof RUN_FOLDER

The program works for any run whose logs were written at `OFFBEAT_LOG_LEVEL=debug`. Exit code 1 means that
something is wrong.
"""

import argparse
import json
import re
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faults.audit import audit
from benchmarks.faults.table import MUST_BE_EMPTY
from broker.config import BrokerConfig, JournalConfig
from broker.core.records import Committed, LearnerJoined, decode_event
from broker.core.state import BrokerState
from broker.journal.journal import Journal
from broker.journal.opening import records
from broker.journal.records import Kind, Loss, unpack_segment
from broker.recovery import JournalStore, recover
from protocol.codec import decode_segment

ACKNOWLEDGED = re.compile(rb"segment (\d+) of (\S+): stored")


@dataclass
class Proof:
    """Counts and findings of a campaign. The surviving line has the learner steps that no restart undid."""

    acknowledged: int = 0
    """Segments that the broker acknowledged to an actor as stored."""
    lost: list[tuple[str, int]] = field(default_factory=list)
    """Acknowledged segments that the journal does not have."""
    steps: int = 0
    """Learner steps of the surviving line."""
    units_trained: int = 0
    trained_twice: list[str] = field(default_factory=list)
    """Units that entered the gradient of two steps of the surviving line."""
    rolled_back: int = 0
    """Units of steps that were undone because a learner died before a checkpoint covered them."""
    damaged_records: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    """Number of segments by their outcome."""
    held: int = 0
    violation: str = ""
    audit: list[str] = field(default_factory=list)
    """Findings of `benchmarks.faults.audit`."""
    by_fault: dict[str, list[int]] = field(default_factory=dict)
    """Segments by kind of fault: acknowledged meanwhile, of these lost, and of these trained twice."""


class Acknowledged(NamedTuple):
    """Place in an actor's log that first says that a segment is stored."""

    log: str
    offset: int


def acknowledged(logs: Path) -> dict[tuple[str, int], Acknowledged]:
    """Return the segments that actors logged as stored, with the place in the log."""
    found: dict[tuple[str, int], Acknowledged] = {}
    for path in logs.glob("actor*.log"):
        for match in ACKNOWLEDGED.finditer(path.read_bytes()):
            key = match[2].decode(), int(match[1])
            found.setdefault(key, Acknowledged(path.name, match.start()))
    return found


def by_fault(
    said: Mapping[tuple[str, int], Acknowledged],
    results: Sequence[dict[str, Any]],
    lost: Collection[tuple[str, int]],
    twice: Collection[tuple[str, int]],
) -> dict[str, list[int]]:
    """Return segment counts by kind of fault: acknowledged meanwhile, of these lost, and trained twice."""
    counts: dict[str, list[int]] = {result["kind"]: [0, 0, 0] for result in results}
    ends = {
        log: [result["log_bytes"].get(log, 0) for result in results]
        for log in {at.log for at in said.values()}
    }
    for key, at in said.items():
        number = bisect_right(ends[at.log], at.offset)
        if number < len(results):
            row = counts[results[number]["kind"]]
            row[0] += 1
            row[1] += key in lost
            row[2] += key in twice
    return counts


class Line:
    """The surviving line of learner steps, rebuilt from the journal's events."""

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


def prove(folder: Path, results: Sequence[dict[str, Any]] = ()) -> Proof:
    """Check a run that has ended.

    Args:
        folder: the run folder.
        results: results of the faults in order. Their log sizes tell which fault was going on when.
    """
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
    proof.acknowledged, proof.lost = len(said), sorted(said.keys() - stored)
    proof.steps, proof.units_trained = len(set(line.steps.values())), len(line.steps)
    proof.trained_twice, proof.rolled_back = line.twice, line.rolled_back
    _state(folder, proof)
    found = audit(folder)
    proof.audit = found.wrong
    if all("log_bytes" in result for result in results):
        proof.by_fault = by_fault(said, results, set(proof.lost), found.segments_twice)
    return proof


def _state(folder: Path, proof: Proof) -> None:
    """Recover the state from a copy of the journal, as a broker would. Add its counts to ``proof``."""
    with tempfile.TemporaryDirectory() as copy:
        for path in (folder / "journal").iterdir():
            (Path(copy) / path.name).write_bytes(path.read_bytes())
        config = JournalConfig()
        journal = Journal.open(Path(copy), run=folder.name, config=config, accept_loss=True)
        store = JournalStore(journal, config.max_bytes)
        state = BrokerState(BrokerConfig(), store, 1 << 30)
        recover(state, store, journal.recovered(), now=0.0)
        proof.violation, proof.held = state.violation(), len(store)
        proof.outcomes = {name: t.segments for name, t in state.ledger.outcomes.items() if t.segments}
        journal.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of a run that has ended")
    proof = asdict(prove(parser.parse_args().folder.resolve()))
    print(json.dumps(proof, indent=1))
    sys.exit(1 if any(proof[what] for what in MUST_BE_EMPTY) else 0)


if __name__ == "__main__":
    main()
