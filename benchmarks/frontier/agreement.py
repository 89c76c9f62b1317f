"""The same cells through the roles of a real run: a broker, a vLLM generator, an actor, and the learner of every run.

The loop in one process is only worth something if it gives what the system gives. `benchmarks.real_system` runs a cell
with the settings of `benchmarks.frontier.cells`, the loop runs it four times with different samples, and the
difference of the two systems is compared with the spread of the loop.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.frontier.cells import Cell, config_of, settings_of

CELLS = tuple(
    Cell(task, row, lag, 0, 1.0)
    for task, row, lag in (
        ("budget", "uncorrected", 0),
        ("budget", "grpo", 16),
        ("budget", "uncorrected", 4),
        ("letters", "uncorrected", 0),
        ("letters", "grpo", 16),
    )
)
"""Cells that are run through the real system."""
REPEATS = 4
COMPARED = ("entropy 1", "entropy 2", "entropy 3", "entropy 4", "score")
"""Numbers that are compared: entropy of the trained tokens in the quarters of the run, in nats, and mean return under
the last version."""
LEAST_NOISE = 0.02
"""Noise below which a difference is not counted, because both evaluations are samples."""
FACTOR = 3.0
"""Multiple of the loop's spread by which the real system may differ."""


class Pair(Struct, frozen=True):
    """A cell in both systems."""

    task: str
    row: str
    lag: int
    steps: int
    settings: str
    real: dict[str, float]
    loop: list[dict[str, float]]
    exact: bool
    """Whether all tokens lagged as forced, in both."""
    seconds: float
    """Wall time in the real system."""
    loop_seconds: float
    """Wall time of one run of the loop."""

    def differs(self, name: str) -> tuple[float, float]:
        """Return the difference of the real system from the mean of the loop, and what is allowed."""
        values = [one[name] for one in self.loop]
        return abs(self.real[name] - statistics.fmean(values)), FACTOR * max(
            LEAST_NOISE, statistics.stdev(values)
        )

    def within(self, name: str) -> bool:
        """Return whether a number of the real system is within the noise of the loop."""
        found, allowed = self.differs(name)
        return found <= allowed

    def outside(self, name: str) -> bool:
        """Return whether a number of the real system is less or more than in all runs of the loop."""
        values = [one[name] for one in self.loop]
        return not min(values) <= self.real[name] <= max(values)

    @property
    def agrees(self) -> bool:
        """Whether all numbers are within the noise."""
        return self.exact and all(map(self.within, self.real))


def compared(cell: Cell, system: object) -> Pair:
    """Run a cell in both systems.

    Args:
        system: the running roles, a `benchmarks.real_system.System`.
    """
    from benchmarks.frontier.loop import quarters, run_cell
    from benchmarks.real_system import train
    from envs.registry import make_suite
    from launch.model import prepare

    config = config_of(cell)
    outcome = train(system, config, cell.seed)  # type: ignore[arg-type]
    real = numbers(quarters(outcome.diagnostics["learner/entropy_nats"]), outcome.score)
    model, suite = prepare(config), make_suite(config.env.name, config.env.params)
    found, exact, began = [], outcome.exact, time.monotonic()
    for again in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            one = run_cell(
                config.learner, suite, model, seed=cell.seed, again=again, folder=Path(folder), probes=False
            )
        exact = exact and one.exact
        found.append(numbers(one.entropies, one.last))
    seconds = (time.monotonic() - began) / REPEATS
    return Pair(
        cell.task, cell.row, cell.lag, cell.steps, settings_of(cell), real, found, exact,
        seconds=outcome.seconds, loop_seconds=seconds,
    )  # fmt: skip


def numbers(entropies: Sequence[float], score: float) -> dict[str, float]:
    """Return the numbers that are compared, by their names in `COMPARED`."""
    return dict(zip(COMPARED, (*entropies, score), strict=True))


def known(path: Path) -> list[Pair]:
    """Return the pairs in a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Pair) for line in lines]


def table(pairs: Sequence[Pair]) -> str:
    """Return the comparison as a table."""
    if not pairs:
        return "The comparison with the real system is missing on this version."
    lines = [
        "| task | recipe | lag | number | real system | loop, run by run | within noise |",
        "|---" * 7 + "|",
    ]
    for pair in pairs:
        for name, value in pair.real.items():
            loop = " / ".join(f"{one[name]:.3f}" for one in pair.loop)
            cells = [pair.task, pair.row, str(pair.lag), name, f"{value:.3f}", loop]
            lines.append(f"| {' | '.join(cells)} | {'yes' if pair.within(name) else 'no'} |")
    numbers_ = [pair.within(name) for pair in pairs for name in pair.real]
    outside = [pair.outside(name) for pair in pairs for name in pair.real]
    by_chance = sum(2 / (len(pair.loop) + 1) for pair in pairs for _ in pair.real)
    exact = sum(pair.exact for pair in pairs)
    faster = statistics.median(pair.seconds / pair.loop_seconds for pair in pairs)
    return "\n".join(
        [
            *lines,
            "",
            f"{sum(numbers_)} of {len(numbers_)} numbers are within the noise. {sum(outside)} lie outside all runs of "
            f"the loop; {by_chance:.0f} would if the systems were one. Each token lagged as forced in {exact} of "
            f"{len(pairs)} cells, in both systems. The real system takes {faster:.1f} times as long (median).",
        ]
    )


def agree(args: argparse.Namespace) -> None:
    """Run what the file does not have yet, until the deadline; end with an error if a cell does not agree."""
    from benchmarks.real_system import running

    deadline = time.monotonic() + 60 * args.minutes
    done = {(p.task, p.row, p.lag, p.steps, p.settings) for p in known(args.out)}
    cells = [replace(cell, steps=args.steps) if args.steps else cell for cell in CELLS[: args.cells]]
    wanted = [c for c in cells if (c.task, c.row, c.lag, c.steps, settings_of(c)) not in done]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for task in dict.fromkeys(cell.task for cell in wanted):
        with running(config_of(next(cell for cell in wanted if cell.task == task))) as system:
            for cell in (cell for cell in wanted if cell.task == task):
                if time.monotonic() > deadline:
                    break
                pair = compared(cell, system)
                with open(args.out, "ab") as lines:
                    lines.write(msgspec.json.encode(pair) + b"\n")
                sys.stderr.write(f"{pair}\n")
    sys.stdout.write(table(known(args.out)) + "\n")
    if bad := [pair for pair in known(args.out) if not pair.agrees]:
        sys.exit(f"{len(bad)} cells in which the loop and the real system differ")
