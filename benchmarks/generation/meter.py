"""Work of a round, and what it took: tokens, seconds, and CPU seconds of each process."""

import os
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Work:
    """The work of one round.

    ``requests`` prompts of ``prompt`` characters, at most ``concurrent`` at a time, answers of ``answer``
    tokens.
    """

    requests: int
    concurrent: int
    prompt: int
    answer: int


@dataclass(frozen=True)
class Outcome:
    """Result of one round: tokens sampled, seconds, and CPU seconds of each process."""

    tokens: int
    seconds: float
    cpu: dict[str, float]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def children(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    found = [
        int(p) for path in Path(f"/proc/{pid}/task").glob("*/children") for p in path.read_text().split()
    ]
    return found + [deeper for child in found for deeper in children(child)]


class Meter:
    """CPU time of named processes since the meter was created."""

    def __init__(self, processes: dict[str, list[int]]) -> None:
        self._processes = processes
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        return {name: sum(map(cpu_seconds, pids)) for name, pids in self._processes.items()}

    def used(self) -> dict[str, float]:
        return {name: seconds - self._before[name] for name, seconds in self._now().items()}
