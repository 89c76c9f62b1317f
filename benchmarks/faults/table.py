"""Findings of a campaign, as files and as the table of docs/run/reliability.md."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

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
