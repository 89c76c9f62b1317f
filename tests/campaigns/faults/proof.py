"""Prove that a run lost nothing: read its actors' logs and its journal, and recover the broker's state.

    python -m tests.campaigns.faults.proof RUN_FOLDER

The program works for any run whose logs were written at `OFFBEAT_LOG_LEVEL=debug`. Exit code 1 means that
something is wrong.
"""

import argparse
import json
import re
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from broker.config import BrokerConfig, JournalConfig
from broker.core.records import Committed, LearnerJoined, decode_event
from broker.core.state import BrokerState
from broker.journal.journal import Journal
from broker.journal.opening import records
from broker.journal.writer import Kind, Loss, unpack_segment
from broker.output_commit import JournalStore, recover
from protocol.codec import decode_segment
from tests.campaigns.faults.audit import audit

HEAD = ["fault", "injected", "recovered", "median s", "worst s", "acknowledged", "lost", "trained twice"]
CONTRADICTIONS = "contradictions between the journal, its snapshots, and what the learner says"
MUST_BE_EMPTY = ("lost", "trained_twice", "violation", "damaged_records", "audit")


def lines_of(out: Path) -> Path:
    """Return the file beside a campaign's JSON that gets one line for each finished fault."""
    return out.with_suffix(".jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the results so far. A line that was cut because the program ended is left out."""
    results = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            results.append(json.loads(line))
    return results


def load(path: Path) -> dict[str, Any]:
    """Return a campaign's findings from its JSON, or only the results from its JSON Lines file."""
    if path.suffix == ".jsonl":
        return {"results": read_lines(path)}
    found: dict[str, Any] = json.loads(path.read_text())["results"]
    return found


def merged(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Merge the findings of a campaign in two parts with a run each. ``after`` has the results of both.

    Example:
        >>> before = {"proof": {"lost": [1], "held": 2, "by_fault": {"k": [70, 0, 0]}}}
        >>> after = {"proof": {"lost": [], "held": 3, "by_fault": {"k": [5, 0, 0]}}, "results": []}
        >>> merged(before, after)
        {'proof': {'lost': [1], 'held': 5, 'by_fault': {'k': [75, 0, 0]}}, 'results': []}
    """
    both = {**before, **after}
    for name in ("deadlock", "exit_code"):
        if before.get(name):
            both[name] = before[name]
    if "proof" in before and "proof" in after:
        both["proof"] = _sum(before["proof"], after["proof"])
        counts = [part["proof"].get("by_fault", {}) for part in (before, after)]
        if any(counts):
            kinds = dict.fromkeys([*counts[0], *counts[1]])
            rows = {kind: [of[kind] for of in counts if kind in of] for kind in kinds}
            both["proof"]["by_fault"] = {
                kind: list(map(sum, zip(*rows[kind], strict=True))) for kind in kinds
            }
    return both


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, dict):
        return {
            name: _sum(a[name], b[name]) if name in a and name in b else {**a, **b}[name]
            for name in {**a, **b}
        }
    return a + b


def failures(found: dict[str, Any]) -> list[str]:
    """Return the reasons why a campaign has failed. An empty list means success.

    Example:
        >>> failures({"results": [{"kind": "no key", "error": "a stranger was let in"}], "proof": {"lost": []}})
        ['no key: a stranger was let in']
    """
    proof = found.get("proof", {})
    wrong = [f"{result['kind']}: {result['error']}" for result in found["results"] if "error" in result]
    wrong += [
        f"{what.replace('_', ' ')}: {str(proof[what])[:1000]}" for what in MUST_BE_EMPTY if proof.get(what)
    ]
    if "deadlock" in found:
        wrong.append(f"deadlock: {found['deadlock'][:1000]}")
    if found.get("exit_code", 0):
        wrong.append(f"the run ended with code {found['exit_code']}")
    return wrong


def table(found: dict[str, Any]) -> str:
    """Return the Markdown tables that docs/run/reliability.md shows."""
    results, proof = found["results"], found.get("proof", {})
    rows = [HEAD, ["---"] * len(HEAD), *summary(results, proof.get("by_fault", {}))]
    injected, recovered = len(results), sum(result["recovered"] for result in results)
    rows.append(["**all**", f"**{injected}**", f"**{recovered}**", *[""] * (len(HEAD) - 3)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if proof:
        lines += ["", "| over the whole campaign | |", "| --- | --- |"]
        lines += [f"| {name} | {value} |" for name, value in totals(found).items()]
    return "\n".join(lines)


def summary(results: Iterable[dict[str, Any]], by_fault: dict[str, list[int]]) -> list[list[str]]:
    """Return the table's rows: kind, injected, recovered, seconds to recover (median, worst), segment counts.

    Example:
        >>> summary([{"kind": "k", "seconds": 1.0, "recovered": True}], {"k": [70, 0, 0]})
        [['k', '1', '1', '1.0', '1.0', '70', '0', '0']]
    """
    of_kind: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        of_kind.setdefault(result["kind"], []).append(result)
    rows = []
    for kind, these in sorted(of_kind.items()):
        seconds = sorted(result["seconds"] for result in these if result["recovered"])
        median = f"{seconds[len(seconds) // 2]:.1f}" if seconds else "-"
        worst = f"{seconds[-1]:.1f}" if seconds else "-"
        counts = [f"{count:,}" for count in by_fault[kind]] if kind in by_fault else ["-"] * 3
        rows.append([kind, str(len(these)), str(len(seconds)), median, worst, *counts])
    return rows


def totals(found: dict[str, Any]) -> dict[str, str]:
    """Return the totals of a campaign: counts that must be zero, and the counts they refer to."""
    proof = found["proof"]
    contradictions = {CONTRADICTIONS: str(len(proof["audit"]))} if "audit" in proof else {}
    return {
        "segments acknowledged to actors": f"{proof['acknowledged']:,}",
        "of these lost": str(len(proof["lost"])),
        "steps of the surviving line": f"{proof['steps']:,}",
        "units trained in it": f"{proof['units_trained']:,}",
        "of these trained twice": str(len(proof["trained_twice"])),
        "units given back after a learner was killed": f"{proof['rolled_back']:,}",
        "deadlocks": str(int("deadlock" in found)),
        "ledger violations": str(int(bool(proof["violation"]))),
        **contradictions,
        "segments by what became of them": ", ".join(f"{k} {v:,}" for k, v in proof["outcomes"].items()),
        "held at the end": f"{proof['held']:,}",
    }


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
    """Findings of `tests.campaigns.faults.audit`."""
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
