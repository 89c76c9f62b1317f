"""Tells who has not joined the broker yet after a start, for how long, and how long it took the last time."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from launch.supervise.health import PEERS, role_of
from protocol.files import write_whole

FILE = ".start-seconds.json"
"""File in the folder of run folders: seconds from start to join in the last run, by role."""
STAGES = {
    "learner": "imports DeepSpeed, loads the model",
    "generator": "imports vLLM, loads the model, makes its first steps",
    "actor": "opens tokenizer and environment",
}
"""Work of a role's process before it joins."""
USUAL = {"learner": "10 to 60 s", "generator": "15 to 90 s", "actor": "2 to 15 s"}
"""Time from start to join on a machine with two cores, where no earlier run has measured it."""


class Starting:
    """The processes of a run that have not joined the broker since the run was started.

    Args:
        names: processes of the run.
        last: seconds that each role took the last time; may be empty.

    Example:
        >>> starting = Starting(["broker", "learner", "actor-0"], {"learner": 68.0})
        >>> starting.look(["actor-0"], {"learner": 12.0, "actor-0": 12.0})
        ['actor-0 has joined after 12 s']
        >>> starting.text
        'learner 12 s (imports DeepSpeed, loads the model; last time 68 s)'
        >>> starting.look(["learner", "actor-0"], {"learner": 70.0, "actor-0": 70.0})
        ['learner has joined after 70 s']
        >>> starting.text, starting.done
        ('', 'all roles have joined: actor after 12 s, learner after 70 s')
    """

    def __init__(self, names: Iterable[str], last: Mapping[str, float]) -> None:
        self._ages = {name: 0.0 for name in names if role_of(name) in PEERS}
        self._last = last
        self.took: dict[str, float] = {}
        """Seconds that each role took this time: of its slowest process that has joined."""

    @property
    def text(self) -> str:
        """List the processes that have not joined; "" if all have."""
        return ", ".join(f"{name} {age:.0f} s ({self._about(name)})" for name, age in self._ages.items())

    @property
    def done(self) -> str:
        """Say that all processes have joined, and after how long each role has; "" while one is missing."""
        took = ", ".join(f"{role} after {seconds:.0f} s" for role, seconds in self.took.items())
        return "" if self._ages else f"all roles have joined: {took}"

    def look(self, joined: Iterable[str], ages: Mapping[str, float]) -> list[str]:
        """Take the names that have joined. Return a sentence for each that is new.

        Args:
            ages: seconds since the start of each process.
        """
        said = []
        for name in joined:
            if name in self._ages:
                del self._ages[name]
                seconds, role = ages.get(name, 0.0), role_of(name)
                self.took[role] = max(self.took.get(role, 0.0), round(seconds, 1))
                said.append(f"{name} has joined after {seconds:.0f} s")
        self._ages = {name: ages.get(name, age) for name, age in self._ages.items()}
        return said

    def _about(self, name: str) -> str:
        role = role_of(name)
        long = f"last time {self._last[role]:.0f} s" if role in self._last else f"usually {USUAL[role]}"
        return f"{STAGES[role]}; {long}"


def last_starts(runs: Path) -> dict[str, float]:
    """Return the seconds that each role took to join in the last run; empty if that is not known."""
    try:
        content = json.loads((runs / FILE).read_text(encoding="utf-8"))
        return {str(role): float(seconds) for role, seconds in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def keep_starts(runs: Path, took: Mapping[str, float]) -> None:
    """Write the seconds that each role took to join. A folder that cannot be written keeps the former ones."""
    try:
        write_whole(runs / FILE, json.dumps(dict(took)), durable=False, shared=True)
    except OSError:
        return
