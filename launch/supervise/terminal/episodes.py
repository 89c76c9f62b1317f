"""Sentences on what became of episodes, for the progress line, `offbeat status` and the table at the end. Pure."""

from collections.abc import Mapping
from typing import Any

from protocol.failures import FailureCounts, describe

SHOWN_FAILURES = 8


def percent(part: float, whole: float) -> str:
    """Return a share in percent; a small one is not shown as 0.

    Example:
        >>> percent(1, 2), percent(1, 5000), percent(0, 3)
        ('50 %', '0.02 %', '0 %')
    """
    share = 100 * part / max(1, whole)
    return f"{share:.0f} %" if share >= 1 or not share else f"{share:.1g} %"


def failing(episodes: Mapping[str, Any]) -> str:
    """Return what share of the episodes that ended last failed, and why; "" if none did.

    Args:
        episodes: section of `/status`; empty if the broker does not have it.

    Example:
        >>> failing({"recent": 64, "recent_failed": 64, "why": "KeyError: 'answer' in my_task.py:23"})
        " | failed 100 %: KeyError: 'answer' in my_task.py:23"
    """
    if not episodes.get("recent_failed"):
        return ""
    return f" | failed {percent(episodes['recent_failed'], episodes['recent'])}: {episodes['why']}"


def episodes_row(episodes: Mapping[str, Any]) -> str:
    """Return how many episodes ended, what share of them failed, and why.

    Example:
        >>> episodes_row({"episodes": 640, "failed": 0, "failures": []})
        '640, none failed'
        >>> kind = {"kind": "KeyError", "message": "'a'", "place": "t.py:3", "fault": True, "count": 320}
        >>> episodes_row({"episodes": 640, "failed": 320, "failures": [kind]})
        "640, failed 50 %: KeyError: 'a' in t.py:3"
    """
    failures = FailureCounts.from_rows(episodes["failed"], episodes["failures"])
    if not failures.total:
        return f"{episodes['episodes']:,}, none failed"
    return f"{episodes['episodes']:,}, failed {percent(failures.total, episodes['episodes'])}: {failures.sentence()}"


def episodes_lines(episodes: Mapping[str, Any]) -> list[str]:
    """Return the lines on episodes: how many ended, what share failed, and each kind of failure with its count."""
    if not episodes.get("ended") and not episodes.get("interrupted"):
        return []
    failed = f"{episodes['failed']:,} failed"
    if episodes["failed"]:
        failed += (
            f", {percent(episodes['recent_failed'], episodes['recent'])} of the last {episodes['recent']}"
        )
    lines = [f"episodes {episodes['ended']:,} ended, {failed}"]
    for row in episodes["failures"][:SHOWN_FAILURES]:
        (failure, count) = next(FailureCounts.from_rows(0, [row]).most_frequent())
        lines.append(f"  {count:,} failed: {describe(failure)}")
    if episodes["interrupted"]:
        lines.append(
            f"  {episodes['interrupted']:,} interrupted, and run again: {episodes['interrupted_why']}"
        )
    return lines
