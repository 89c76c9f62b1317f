"""`offbeat status` of a run that has ended: its summary in place of a broker that is gone."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.supervise.terminal.end_table import summary_rows

SUMMARY = "summary.json"


def summary_of(folder: Path, begun: Sequence[Path]) -> dict[str, Any] | None:
    """Return the summary of a run that has ended; None if there is none, or if the run was begun again since.

    Args:
        begun: files that are written when the run begins, where they exist.
    """
    path = folder / SUMMARY
    try:
        written = path.stat().st_mtime
        if any(file.stat().st_mtime > written for file in begun if file.exists()):
            return None
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def ended_page(summary: Mapping[str, Any], seconds: float) -> str:
    """Return the page of an ended run.

    Args:
        seconds: time since its end.
    """
    rows = [("model", str(summary["model"])), *summary_rows(dict(summary))]
    width = max(len(name) for name, _ in rows)
    head = f"run {summary['run']} ended {ago(seconds)}: {summary['ended_by']}"
    return "\n".join([head, *(f"  {name.ljust(width)}  {value}" for name, value in rows)])


def seconds_since_end(folder: Path) -> float:
    """Return the time since the summary was written, in seconds."""
    return max(0.0, time.time() - (folder / SUMMARY).stat().st_mtime)


def ago(seconds: float) -> str:
    """Return a time in the past in words.

    Example:
        >>> ago(4.0), ago(200.0), ago(7300.0), ago(3 * 86_400.0)
        ('just now', '3 min ago', '2 h ago', '3 days ago')
    """
    for unit_s, unit in ((2 * 86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds // (86_400 if unit == 'days' else unit_s):.0f} {unit} ago"
    return "just now"
