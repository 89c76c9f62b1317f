"""What the kernel says: cores and memory of this host, and processes with their descendants."""

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(limit: Path = CPU_LIMIT) -> int:
    """Return how many cores this process may keep busy: those of its affinity, or fewer if its container has a limit.

    Args:
        limit: file of the control group: microseconds of CPU time and the period, or "max" and the period.
    """
    there = len(os.sched_getaffinity(0))
    try:
        quota, period = limit.read_text(encoding="ascii").split()
        return there if quota == "max" else max(1, min(there, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return there


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory since it started; 0 if it does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class _Stat:
    parent: int
    state: str
    cpu_s: float


def families(pids: Iterable[int]) -> dict[int, dict[int, _Stat]]:
    """Return for each of ``pids`` the living processes among it and its descendants."""
    table = _process_table()
    children: dict[int, list[int]] = {}
    for pid, stat in table.items():
        children.setdefault(stat.parent, []).append(pid)
    found: dict[int, dict[int, _Stat]] = {}
    for head in pids:
        members, frontier = {}, [head] if head in table else []
        while frontier:
            pid = frontier.pop()
            members[pid] = table[pid]
            frontier += children.get(pid, [])
        found[head] = members
    return found


def _process_table() -> dict[int, _Stat]:
    table = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        # A process may end after /proc was listed.
        with contextlib.suppress(OSError, IndexError):
            fields = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
                table[int(entry.name)] = _Stat(int(fields[1]), fields[0], cpu_s)
    return table
