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
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.broker.arms import LONG, LOOP, OTHERS, OURS, Arm
from benchmarks.broker.measuring import latency, make_load, summary, throughput
from benchmarks.broker.others import why_no_redis
from benchmarks.broker.tables import Results, headlines, tables
from benchmarks.report import save_results

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
