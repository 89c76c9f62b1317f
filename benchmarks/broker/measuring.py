"""Measures one arm under one load: CPU time per segment, rates, and latency."""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.broker.arms import Arm, Run, ours, running
from benchmarks.broker.load import Load

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
