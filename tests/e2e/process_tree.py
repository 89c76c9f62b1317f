"""Functions that list the descendants of a process, and those that are still alive."""

import time
from pathlib import Path


def descendants(pid: int) -> set[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    found, frontier = set(), {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def alive(pids: set[int]) -> set[int]:
    running = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                running.add(pid)
        except OSError:
            continue
    return running


def await_gone(pids: set[int], deadline_s: float = 30.0) -> set[int]:
    deadline = time.monotonic() + deadline_s
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left
