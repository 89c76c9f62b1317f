"""Compare the learner's own reports of what it trained with the commits in the broker's journal.

A broker that dies can lose a commit, and the learner may then train the unit again. The journal shows that
unit at one step only. The learner's log (at `OFFBEAT_LOG_LEVEL=debug`) shows it at two steps, and the metrics
of the first step count more trained tokens than were committed.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import msgspec

from learner.checkpoint_files import latest_name

SAID = re.compile(r"step (\d+) trained (\S.*)")
SHOWN = 10


def by_metrics(tokens: dict[int, int], path: Path) -> list[str]:
    """Return the steps that trained more tokens than the journal committed: a commit is missing there.

    Fewer tokens are in order, because failed members of a group and tokens beyond the lag bound carry no
    gradient.
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
    """Return the steps at which the learner's log says each unit was trained, in the surviving line.

    When a step appears again, it and all later steps of the log so far are undone.
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
    """Return the units that the learner's log shows at two steps, or at a different step than the journal."""
    said = said_by_learner(log)
    wrong = [
        f"the learner's log has {unit} at steps {steps}" for unit, steps in said.items() if len(steps) > 1
    ]
    return (wrong + _compare_steps({unit: steps[0] for unit, steps in said.items()}, journal, "log"))[:SHOWN]


def by_checkpoint(journal: dict[str, int], folder: Path) -> list[str]:
    """Return the units that the newest checkpoint lacks, or has at a different step than the journal."""
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
