"""Measure the cost of a segment in the broker, compared with sockets that only forward and Redis Streams.

    python -m benchmarks.broker [--redis redis-server] [--json build/broker.json] [--repetitions 3]
                                [--seconds 1.5]

The cost of a segment covers the segment in, its acknowledgement out, the lease before it, and its share of
the delivery and the commit of its group. The figure to trust is the CPU time of the broker's process (all
threads, user and system) divided by the segments of the same time. Rates depend on how many cores the other
processes have. Arms take turns, so that other work on the machine disturbs all of them alike. Each run has a
fresh process and a fresh journal.
"""

import argparse
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.broker.arms import LONG, LOOP, OTHERS, OURS, Arm, Run, ours, running, why_no_redis
from benchmarks.broker.load import Load
from benchmarks.report import save_results

WINDOWS = {1 << 10: 64, 1 << 14: 64, 1 << 17: 32, 1 << 20: 16}
ACTORS = 8
WARM_S = 0.5
WAIT_S = 30.0
LATENCY_RATE, LATENCY_SAMPLES, LATENCY_WARM = 1_000.0, 3_000, 500
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the user and system seconds of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(run: Run, seconds: float, nbytes: int) -> dict[str, float]:
    """Wait until segments flow, then measure rates and CPU time per segment for ``seconds``."""
    until(lambda: run.done.value > 0, "segments flow")
    time.sleep(WARM_S)
    cpu, done, at = cpu_seconds(run.pid), run.done.value, time.perf_counter()
    time.sleep(seconds)
    cpu, done, at = cpu_seconds(run.pid) - cpu, run.done.value - done, time.perf_counter() - at
    assert done, "no segment was done in this time"
    return {"cpu_us": cpu / done * 1e6, "per_s": done / at, "mb_per_s": done * nbytes / at / 1e6}


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {WAIT_S:g} s: {what}")
        time.sleep(0.01)


def make_load(nbytes: int, segments: int = 1) -> Load:
    window = max(ACTORS, WINDOWS[nbytes] // segments)
    return Load("", nbytes, ACTORS, window, outstanding=4 * window, segments=segments)


def throughput(arm: Arm, load: Load, arguments: argparse.Namespace) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        running(arm, Path(folder), load, arguments.redis) as run,
    ):
        return measure(run, arguments.seconds, load.nbytes)


def latency(arm: Arm, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure the time in ms from sending a segment of 16 KB to its acknowledgement, at 1,000 segments/s.

    Raises:
        TimeoutError: the acknowledgements did not come within `WAIT_S`.
    """
    load = replace(make_load(1 << 14), rate=LATENCY_RATE, samples=LATENCY_SAMPLES + LATENCY_WARM)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, ours(arm, Path(folder), load) as run:
        if not run.results.poll(WAIT_S):
            raise TimeoutError(f"{arm.name}: {LATENCY_SAMPLES} acknowledgements did not come in {WAIT_S:g} s")
        cuts = statistics.quantiles(run.results.recv()[LATENCY_WARM:], n=100)
    return {"p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}


def summary(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return the median, minimum and maximum of each figure."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {name: [statistics.median(v), min(v), max(v)] for name, v in columns.items()}


FIGURES = {
    "over_loop": "CPU over that of the loop in Python that only forwards, round by round",
    "cpu_us": "CPU microseconds of the broker per segment",
    "per_s": "segments/s",
    "mb_per_s": "MB/s",
}
Results = dict[str, dict[str, Any]]


def tables(results: dict[str, Results], chosen: list[str]) -> dict[str, str]:
    """Return the results as Markdown tables, by name."""
    found = dict[str, str]()
    if "sizes" in results:
        for figure, title in FIGURES.items():
            rows = "\n".join(_table(results["sizes"], chosen, figure))
            found[figure] = f"**{title}** (median, in brackets minimum and maximum)\n\n{rows}"
    if "latency" in results:
        rows = "\n".join(_rows(results["latency"], {"p50_ms": ("p50", 2), "p99_ms": ("p99", 2)}))
        found["latency"] = (
            f"**Milliseconds from sending a segment of 16 KB to its acknowledgement**\n\n{rows}"
        )
    if "peers" in results:
        columns = {
            "cpu_us": ("CPU us a segment", 0),
            "over_loop": ("over the forwarder", 2),
            "per_s": ("segments/s", 0),
        }
        rows = "\n".join(_rows(results["peers"], columns))
        found["peers"] = f"**Cost of a segment of 16 KB over connected actors**\n\n{rows}"
    return found


def headlines(results: dict[str, Results]) -> list[tuple[str, str, str]]:
    """Return the cost of the broker as it is shipped, encrypted with a synced journal, for the README."""
    row = results.get("sizes", {}).get("ours, CURVE, journal synced", {})
    what = "CPU of the broker for a segment of {}, encrypted, journal synced (less is better)"
    return [
        (what.format(size), "a plain ZeroMQ forwarder in Python", _cell(figures["over_loop"], 2))
        for size, figures in row.items()
    ]


def _table(rows: Results, columns: list[str], figure: str) -> list[str]:
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        digits = 2 if figure == "over_loop" else 0
        cells = [
            row["missing"] if "missing" in row else _cell(row[column][figure], digits) for column in columns
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _rows(rows: Results, columns: dict[str, tuple[str, int]]) -> list[str]:
    """Return the lines of a table. ``columns`` gives the title and the number of digits of each column."""
    lines = [
        f"| | {' | '.join(title for title, _ in columns.values())} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, row in rows.items():
        cells = [_cell(row[column], digits) for column, (_, digits) in columns.items()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _cell(figures: list[float], digits: int) -> str:
    median, least, most = (f"{figure:,.{digits}f}" for figure in figures)
    return median if least == most else f"{median} [{least}, {most}]"


SIZES = {"1 KB": 1 << 10, "16 KB": 1 << 14, "128 KB": 1 << 17, "1 MB": 1 << 20}
PEERS, RATES, AN_ACTOR = (1, 16, 64, 256), (1_000.0, 4_000.0), 4


def sizes(arguments: argparse.Namespace) -> Results:
    """Measure every arm at every size."""
    missing = why_no_redis(arguments.redis)
    every = (*OURS, *LONG, *OTHERS)
    arms = [arm for arm in every if not (arm.other == "redis" and missing)]
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(arguments.repetitions):
        for size in arguments.sizes:
            for arm in arms:
                row = throughput(arm, make_load(SIZES[size], arm.segments), arguments)
                rows.setdefault((arm.name, size), []).append(row)
                logging.info("%s, %s: %.1f us, %.0f /s", arm.name, size, row["cpu_us"], row["per_s"])
    _over_loop(rows)
    results: Results = {
        arm.name: {size: summary(rows[arm.name, size]) for size in arguments.sizes} for arm in arms
    }
    return results | {arm.name: {"missing": missing} for arm in OTHERS if arm not in arms}


def _over_loop(rows: dict[tuple[str, Any], list[dict[str, float]]]) -> None:
    """Add to each row its CPU time over the CPU time of the Python loop in the same round and column."""
    for (_, column), found in rows.items():
        for row, loop in zip(found, rows[LOOP, column], strict=True):
            row["over_loop"] = row["cpu_us"] / loop["cpu_us"]


def peers(arguments: argparse.Namespace) -> Results:
    """Measure the CPU time per segment of 16 KB for each number of connected actors.

    Each number of actors is measured in several ways. First the actors send as fast as the broker takes
    segments, with the same number of trajectories under way for all numbers of connections; the Python loop
    is measured in the same way. Then the actors send at each of `RATES`. Last, each actor has `AN_ACTOR`
    trajectories under way.
    """
    rows: dict[tuple[str, int], list[dict[str, float]]] = {}
    arm = OURS[0]
    for _ in range(arguments.repetitions):
        for count in PEERS:
            load = replace(make_load(1 << 14), actors=count, window=256, outstanding=1024, connections=count)
            own = replace(load, window=AN_ACTOR * count, outstanding=max(64, 4 * AN_ACTOR * count))
            every = [(one, one.name, load) for one in (arm, Arm(LOOP, other="loop"))]
            every += [(arm, f"{arm.name}, {rate:,.0f}/s", replace(load, rate=rate)) for rate in RATES]
            every += [(arm, f"{arm.name}, {AN_ACTOR} an actor", own)]
            for served, name, asked in every:
                rows.setdefault((name, count), []).append(throughput(served, asked, arguments))
    _over_loop(rows)
    return {f"{name}, {count} actors": summary(found) for (name, count), found in rows.items()}


def latencies(arguments: argparse.Namespace) -> Results:
    rows: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.repetitions):
        for arm in OURS:
            rows.setdefault(arm.name, []).append(latency(arm, arguments))
    return {name: summary(found) for name, found in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=["sizes", "latency", "peers"])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=1.5, help="measured time of each run")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--redis", default="redis-server", help="the program, if it is not on PATH")
    parser.add_argument(
        "--folder", default=None, help="where journals are written; a folder on the disk to be measured"
    )
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    # Exit through Python on SIGTERM, so that the processes of the benchmark end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("broker").setLevel(logging.WARNING)
    parts: dict[str, Callable[[argparse.Namespace], Results]] = {
        "sizes": sizes,
        "latency": latencies,
        "peers": peers,
    }
    results = {part: parts[part](arguments) for part in arguments.parts}
    if arguments.json is not None:
        save_results(arguments.json, tables(results, arguments.sizes), results, headlines(results))
    logging.info("%s", "\n\n".join(tables(results, arguments.sizes).values()))
