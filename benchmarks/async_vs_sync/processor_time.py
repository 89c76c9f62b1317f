"""Processor time of the roles and of the machine, and the generators' idle share."""

import json
import os
import urllib.request
from pathlib import Path

from benchmarks.staleness.lag_system import System

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def idle_share(before: dict[str, float], after: dict[str, float]) -> float:
    """Return the generators' idle share between two reports: seconds without a request over seconds served.

    Example:
        >>> a = {"generator/idle_seconds_total": 2.0, "generator/serving_seconds_total": 10.0}
        >>> b = {"generator/idle_seconds_total": 3.0, "generator/serving_seconds_total": 20.0}
        >>> idle_share(a, b)
        0.1
    """
    idle, served = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in ("generator/idle_seconds_total", "generator/serving_seconds_total")
    )
    return idle / served if served > 0 else 0.0


def cpu_seconds(system: System) -> dict[str, float]:
    """Return the processor seconds of each role so far, with child processes. This process is the learner."""
    with urllib.request.urlopen(f"http://{system.config.broker.http}/status", timeout=5) as answer:
        peers = json.load(answer)["peers"]
    times = process_times()
    found = {"learner": times[os.getpid()][1]}
    for peer in peers:
        if peer["role"] != "learner":
            role, pid = peer["role"], int(peer["pid"])
            mine = [cpu for process, (parent, cpu) in times.items() if pid in (process, parent)]
            found[role] = found.get(role, 0.0) + sum(mine)
    others = {os.getpid(), *(int(peer["pid"]) for peer in peers)}
    broker = [
        cpu for process, (parent, cpu) in times.items() if parent == os.getpid() and process not in others
    ]
    found["broker"] = sum(broker)
    return found | {"others": machine_seconds() - sum(found.values())}


def machine_seconds() -> float:
    """Return the busy processor seconds of all cores, time stolen by the host included."""
    line = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    user, nice, system, _, _, interrupts, soft, stolen = map(int, line[1:9])
    return (user + nice + system + interrupts + soft + stolen) / TICKS_PER_S


def process_times() -> dict[int, tuple[int, float]]:
    """Return the parent and the processor seconds so far of each process, by process id."""
    found: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            # The process has ended meanwhile.
            continue
        found[int(path.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S)
    return found
