"""The same cells through the roles of a real run: a broker, a vLLM generator, an actor, and the learner of every run.

The loop in one process is only worth something if it gives what the system gives. `benchmarks.real_system` runs a cell
with the settings of `benchmarks.frontier.cells`, and the difference is compared with that of a cell run twice.
"""

import argparse
import sys
import time

import msgspec

from benchmarks.frontier.cells import Cell, Found, config_of, fingerprint
from benchmarks.report import commit

CELLS = tuple(
    Cell(task, row, lag, 0, 1.0)
    for task, lag in (("letters", 0), ("letters", 16), ("neighbours", 16))
    for row in ("uncorrected", "grpo")
)
"""Cells that are run through the real system."""


def real(chosen: list[Cell], deadline: float) -> list[Found]:
    """Run cells of one task, and so of one set of roles, through the real system, until the deadline."""
    from benchmarks.real_system import running, train

    found: list[Found] = []
    with running(config_of(chosen[0])) as system:
        for cell in chosen:
            if time.monotonic() > deadline:
                break
            config = config_of(cell)
            began = time.monotonic()
            outcome = train(system, config, cell.seed)
            found.append(
                Found(
                    cell.task, cell.row, cell.lag, cell.seed, cell.rate, cell.steps, cell.again,
                    settings=fingerprint(config),
                    score=outcome.score,
                    start=outcome.start,
                    curve=outcome.curve,
                    exact=outcome.exact,
                    seconds=round(time.monotonic() - began, 1),
                    date=time.strftime("%Y-%m-%d"),
                    commit=commit(),
                )
            )  # fmt: skip
            sys.stderr.write(
                f"{cell}: {outcome.score:.3f} in {outcome.seconds:.0f} s, exact {outcome.exact}\n"
            )
    return found


def agree(args: argparse.Namespace) -> None:
    """Run what the file does not have yet, until the deadline."""
    deadline = time.monotonic() + 60 * args.minutes
    lines = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    known = {msgspec.json.decode(line, type=Found, strict=False).cell for line in lines}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    wanted = [cell for cell in CELLS if cell not in known]
    for task in dict.fromkeys(cell.task for cell in wanted):
        for found in real([cell for cell in wanted if cell.task == task], deadline):
            with open(args.out, "ab") as file:
                file.write(msgspec.json.encode(found) + b"\n")
