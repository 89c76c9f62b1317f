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
import contextlib
import logging
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.broker.load import AGES, Load, run_actors, run_learner
from benchmarks.broker.others import (
    consume,
    forward,
    produce,
    redis_consume,
    redis_produce,
    redis_server,
    why_no_redis,
)
from benchmarks.report import save_results
from broker.config import BrokerConfig
from broker.service import serve
from launch.processes.ports import free_port, free_ports
from protocol.security.key_files import make

SIZES = {"1 KB": 1 << 10, "16 KB": 1 << 14, "128 KB": 1 << 17, "1 MB": 1 << 20}
WINDOWS = {1 << 10: 64, 1 << 14: 64, 1 << 17: 32, 1 << 20: 16}
ACTORS = 8
PEERS, RATES, AN_ACTOR = (1, 16, 64, 256), (1_000.0, 4_000.0), 4
WARM_S = 0.5
WAIT_S = 30.0
LATENCY_RATE, LATENCY_SAMPLES, LATENCY_WARM = 1_000.0, 3_000, 500
FIGURES = {
    "over_loop": "CPU over that of the loop in Python that only forwards, round by round",
    "cpu_us": "CPU microseconds of the broker per segment",
    "per_s": "segments/s",
    "mb_per_s": "MB/s",
}
TICKS = os.sysconf("SC_CLK_TCK")

_spawn = multiprocessing.get_context("spawn")


@dataclass
class Run:
    """A broker under load: its process id, the shared count of finished segments, the pipe for latencies."""

    pid: int
    done: Any
    results: Any = None
    ages: Any = None
    """Shared array of seconds: how long each of the last trajectories took from the actor to the learner."""


@dataclass(frozen=True)
class Arm:
    """A broker in one setting.

    ``journal`` is "" (no journal), "written" or "synced". ``segments`` is the number of segments per
    trajectory. ``other`` names what takes our broker's place: "loop", "proxy" or "redis", or "" for our
    broker.
    """

    name: str
    journal: str = ""
    encrypted: bool = False
    segments: int = 1
    other: str = ""


OURS = (
    Arm("ours, memory"),
    Arm("ours, journal written", "written"),
    Arm("ours, journal synced", "synced"),
    Arm("ours, CURVE, memory", encrypted=True),
    Arm("ours, CURVE, journal synced", "synced", encrypted=True),
)
LONG = (
    Arm("ours, memory, 8 segments a trajectory", segments=8),
    Arm("ours, CURVE, memory, 8 segments a trajectory", encrypted=True, segments=8),
    Arm("ours, journal synced, 8 segments a trajectory", "synced", segments=8),
)
LOOP = "pyzmq forwarder, Python loop"
OTHERS = (
    Arm(LOOP, other="loop"),
    Arm("zmq.proxy, C", other="proxy"),
    Arm("Redis Streams, memory", other="redis"),
    Arm("Redis Streams, AOF always", "synced", other="redis"),
)


# --- arms ---------------------------------------------------------------------------------------------------


def serve_ours(settings: dict[str, Any], journal: Path | None, keys: Path | None) -> None:
    """Run the broker's process."""
    logging.basicConfig(level=logging.WARNING)
    config = BrokerConfig.model_validate(settings)
    serve(config, run="benchmark", max_policy_lag=4, journal=journal, keys=keys)


@contextlib.contextmanager
def processes() -> Iterator[Callable[..., Any]]:
    """Yield a function that starts a process. Kill all started processes at the end."""
    started = []

    def start(target: Callable[..., None], *arguments: Any, **named: Any) -> Any:
        process = _spawn.Process(target=target, args=arguments, kwargs=named, daemon=True)
        process.start()
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in reversed(started):
            process.kill()
        for process in started:
            process.join()


@contextlib.contextmanager
def ours(arm: Arm, folder: Path, load: Load) -> Iterator[Run]:
    """Run our broker with actors and a learner."""
    port, http_port = free_ports(2)
    endpoint, http = f"tcp://127.0.0.1:{port}", f"127.0.0.1:{http_port}"
    keys = folder / "keys" if arm.encrypted else None
    if keys is not None:
        make(keys)
    settings: dict[str, Any] = {"endpoint": endpoint, "http": http}
    if arm.journal:
        settings["journal"] = {"durability": arm.journal}
    load = replace(load, endpoint=endpoint, keys=keys)
    acked, committed = _spawn.RawValue("Q", 0), _spawn.RawValue("Q", 0)
    results, sender = _spawn.Pipe(duplex=False)
    ages = _spawn.RawArray("d", AGES)
    with processes() as start:
        journal = folder / "journal" if arm.journal else None
        broker = start(serve_ours, settings, journal, keys)
        start(run_actors, load, acked, sender)
        start(run_learner, load, committed, ages)
        yield Run(broker.pid, committed, results, ages)


@contextlib.contextmanager
def forwarder(arm: Arm, load: Load) -> Iterator[Run]:
    """Run sockets that only forward, with a producer and a consumer."""
    front, back = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    acked = _spawn.RawValue("Q", 0)
    with processes() as start:
        broker = start(forward, front, back, in_c=arm.other == "proxy")
        start(produce, front, load.nbytes, load.window, acked, load.connections)
        start(consume, back)
        yield Run(broker.pid, acked)


@contextlib.contextmanager
def redis_streams(arm: Arm, folder: Path, load: Load, server: str) -> Iterator[Run]:
    """Run Redis with a producer and a consumer."""
    port, acked = free_port(), _spawn.RawValue("Q", 0)
    with (
        redis_server(server, port, folder, persistent=arm.journal != "") as pid,
        processes() as start,
    ):
        start(redis_produce, port, load.nbytes, load.window, acked)
        start(redis_consume, port, load.window, acked)
        yield Run(pid, acked)


def running(arm: Arm, folder: Path, load: Load, server: str) -> contextlib.AbstractContextManager[Run]:
    if arm.other == "redis":
        return redis_streams(arm, folder, load, server)
    return forwarder(arm, load) if arm.other else ours(arm, folder, load)


# --- measuring ----------------------------------------------------------------------------------------------


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


# --- the program --------------------------------------------------------------------------------------------

Results = dict[str, dict[str, Any]]


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
