"""Measure what grows with the number of actors, and with the length of trajectories.

    python -m benchmarks.scaling [--parts actors learner] [--json build/scaling.json] [--repetitions 3]

**actors**: 1, 2, 4, ... 256 actors that only speak the protocol load the broker with segments of 16 KB, as in
`benchmarks.broker`. Each count is a separate run, and the counts take turns. The number of trajectories under
way is constant (`WINDOW` between actors and broker, `OUTSTANDING` in all), so only the number of connections
changes. CPU time and rate are measured while the actors send as fast as the broker takes segments. Age and
policy lag are measured at `RATE` segments per second. The age of a rollout group is the time from sending its
last trajectory to its arrival at the learner. The policy lag is the number of updates of `BATCH` trajectories
in that time.

**learner**: one learner step on one trajectory of 128 to 32,768 tokens (`benchmarks.scaling.learner`).
"""

import argparse
import logging
import os
import signal
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.broker.arms import OURS, ours
from benchmarks.broker.program import make_load, measure
from benchmarks.report import save_results
from benchmarks.scaling.learner import LENGTHS, fit, step_times

ACTORS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WINDOW, OUTSTANDING, BATCH, RATE = 256, 1024, 32, 1_000.0
NBYTES = 1 << 14

Row = dict[str, float]


def actors_row(count: int, seconds: float, folder: str | None) -> Row:
    """Make two runs with ``count`` actors: as fast as the broker takes segments, and at `RATE`."""
    load = replace(make_load(NBYTES), actors=count, window=WINDOW, outstanding=OUTSTANDING)
    with tempfile.TemporaryDirectory(dir=folder) as name, ours(OURS[0], Path(name), load) as run:
        row = measure(run, seconds, NBYTES)
    paced = replace(load, rate=RATE)
    with tempfile.TemporaryDirectory(dir=folder) as name, ours(OURS[0], Path(name), paced) as run:
        row["paced_cpu_us"] = measure(run, seconds, NBYTES)["cpu_us"]
        ages = [age for age in list(run.ages) if age > 0]
    cuts = statistics.quantiles(ages, n=100)
    row |= {"age_p50_ms": cuts[49] * 1e3, "age_p99_ms": cuts[98] * 1e3}
    return row | {"lag_p50": cuts[49] * RATE / BATCH, "lag_p99": cuts[98] * RATE / BATCH}


def actors_part(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every count of actors in each repetition."""
    rows: dict[int, list[Row]] = {count: [] for count in ACTORS}
    for _ in range(arguments.repetitions):
        for count in ACTORS:
            row = actors_row(count, arguments.seconds, arguments.folder)
            rows[count].append(row)
            logging.info("%d actors: %.0f us, %.0f /s", count, row["cpu_us"], row["per_s"])
    first = rows[ACTORS[0]]
    for found in rows.values():
        for row, one in zip(found, first, strict=True):
            row["cpu_ratio"] = row["cpu_us"] / one["cpu_us"]
    return {str(count): summary(found) for count, found in rows.items()}


def learner_part(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every length, each in its own process."""
    found = {length: step_times(length, arguments.repetitions) for length in arguments.lengths}
    seconds = {length: statistics.median(times["step_s"]) for length, times in found.items()}
    shares = fit(seconds)
    result: dict[str, Any] = {}
    for length, times in found.items():
        rows = [{"step_s": s, "us_per_token": s / length * 1e6} for s in times["step_s"]]
        result[str(length)] = summary(rows) | {
            "peak_mb": [times["peak_mb"]] * 3,
            "quadratic_share": [shares[length]] * 3,
        }
    return result


def summary(rows: list[Row]) -> dict[str, list[float]]:
    """Return the median, minimum and maximum of each figure."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {name: [statistics.median(v), min(v), max(v)] for name, v in columns.items()}


# --- tables -------------------------------------------------------------------------------------------------

COLUMNS: dict[str, dict[str, tuple[str, int, float]]] = {
    "actors": {
        "cpu_us": ("CPU us a segment", 0, 1),
        "cpu_ratio": ("over one actor", 2, 1),
        "per_s": ("segments/s", 0, 1),
        "paced_cpu_us": ("CPU us at 1,000/s", 0, 1),
        "age_p50_ms": ("age p50, ms", 0, 1),
        "age_p99_ms": ("age p99, ms", 0, 1),
        "lag_p50": ("lag p50, updates", 2, 1),
        "lag_p99": ("lag p99", 2, 1),
    },
    "learner": {
        "step_s": ("step, s", 2, 1),
        "us_per_token": ("us a token", 0, 1),
        "quadratic_share": ("quadratic part, %", 0, 100),
        "peak_mb": ("memory above start, MB", 0, 1),
    },
}


def table(part: str, rows: dict[str, dict[str, list[float]]]) -> str:
    """Return a Markdown table of medians, with minimum and maximum in brackets."""
    columns = COLUMNS[part]
    titles = [part if part == "actors" else "tokens", *(title for title, _, _ in columns.values())]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, row in rows.items():
        cells = [_cell(row[column], digits, scale) for column, (_, digits, scale) in columns.items()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(figures: list[float], digits: int, scale: float) -> str:
    median, least, most = (f"{figure * scale:,.{digits}f}" for figure in figures)
    return median if least == most else f"{median} [{least}, {most}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--seconds", type=float, default=1.5, help="measured time of each run with actors")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--folder", default=None, help="for temporary files")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    # Limit each process that the benchmark starts to one thread.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Exit through Python on SIGTERM, so that the processes of the benchmark end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parts = {"actors": actors_part, "learner": learner_part}
    results = {part: parts[part](arguments) for part in arguments.parts}
    if arguments.json is not None:
        save_results(arguments.json, {part: table(part, rows) for part, rows in results.items()}, results)
    for part, rows in results.items():
        logging.info("\n%s", table(part, rows))
