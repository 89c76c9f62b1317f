"""What the learner of a campaign says it has trained, held against the commits in the broker's journal.

A unit that was trained twice because its first commit was lost with a broker stands at one step in the journal. It
stands at two in the learner's log (`OFFBEAT_LOG_LEVEL=debug`), and its first step has more gradient than was committed.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import msgspec

from learner.checkpoint import latest_name

SAID = re.compile(r"step (\d+) trained (\S.*)")
SHOWN = 10


def by_metrics(tokens: dict[int, int], path: Path) -> list[str]:
    """Steps with more gradient than the journal has tokens for: something was trained whose commit is not there.

    Less is in order: failed members of a group, and tokens beyond the bound on lag, carry none.
    """
    wrong = []
    for line in path.read_text().splitlines() if path.exists() else ():
        scalars = json.loads(line)
        if "learner/trained_tokens" not in scalars or scalars["step"] not in tokens:
            continue
        fresh = scalars["learner/trained_tokens"] - scalars.get("learner/replayed_tokens", 0.0)
        if fresh > tokens[scalars["step"]]:
            wrong.append(
                f"step {scalars['step']} trained {fresh:.0f} tokens, {tokens[scalars['step']]} were committed"
            )
    return wrong[:SHOWN]


def said_by_learner(log: Path) -> dict[str, list[int]]:
    """Units by the steps at which the learner's log says they were trained, in the line that survived.

    A step that is done again undoes those from it on.
    """
    steps: dict[int, list[str]] = {}
    for match in SAID.finditer(log.read_text(errors="replace") if log.exists() else ""):
        step = int(match[1])
        steps = {at: units for at, units in steps.items() if at < step}
        steps[step] = match[2].split()
    found: dict[str, list[int]] = defaultdict(list)
    for step, units in steps.items():
        for unit in units:
            found[unit].append(step)
    return dict(found)


def by_log(journal: dict[str, int], log: Path) -> list[str]:
    """Units that the learner's own log has at two steps, or at another one than the journal."""
    said = said_by_learner(log)
    wrong = [
        f"the learner's log has {unit} at steps {steps}" for unit, steps in said.items() if len(steps) > 1
    ]
    return (wrong + _compare_steps({unit: steps[0] for unit, steps in said.items()}, journal, "log"))[:SHOWN]


def by_checkpoint(journal: dict[str, int], folder: Path) -> list[str]:
    """Units that the newest checkpoint has at another step than the journal, or that it does not know."""
    if not (folder / "latest").exists():
        return []
    state = msgspec.msgpack.decode((folder / latest_name(folder) / "offbeat-rank0.msgpack").read_bytes())
    client = state["client"]
    said = {unit: step for unit, step, was_trained, *_ in client["inlet"]["committed"] if was_trained}
    wrong = _compare_steps(said, journal, "checkpoint")
    first = min(said.values(), default=0)
    covered = [unit for unit, step in journal.items() if first < step <= client["step"]]
    wrong += [
        f"{unit}, of step {journal[unit]}, is not in the checkpoint" for unit in covered if unit not in said
    ]
    return wrong[:SHOWN]


def _compare_steps(said: dict[str, int], journal: dict[str, int], where: str) -> list[str]:
    return [
        f"the learner's {where} has {unit} at step {step}, the journal at {journal.get(unit, 'none')}"
        for unit, step in said.items()
        if journal.get(unit) != step
    ]
