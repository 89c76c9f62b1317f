"""The page of `offbeat status`, made from what the broker says."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.run_folder import megabytes
from launch.supervise.health import BROKER
from launch.supervise.terminal.episodes import episodes_lines


def page(status: Mapping[str, Any], supervised: Mapping[str, Any], verbose: bool = False) -> str:
    """Return the whole page.

    Args:
        supervised: content of ``supervisor.json``, for restarts; may be empty.
        verbose: show all numbers of the queues and the journal.
    """
    lines = [
        f"run {status['run']}: policy version {status['policy_version']}, learner's epoch {status['epoch']}",
        "",
        *table(status["peers"], supervised),
        "",
        "waits",
        *(f"  {line}" for line in status["waits"] or ["nobody waits"]),
        "",
        "queues   " + (all_of(status["queues"]) if verbose else queues_line(status["queues"])),
        *episodes_lines(status.get("episodes", {})),
        "ledger   " + ledger_line(status["ledger"]),
        "journal  "
        + (all_of(status.get("journal", {})) if verbose else journal_line(status.get("journal", {}))),
    ]
    return "\n".join(lines)


def table(peers: Sequence[Mapping[str, Any]], supervised: Mapping[str, Any]) -> list[str]:
    """Return the table of processes: first the ones that have joined, then the ones that should have."""
    known = supervised.get("processes", {})
    rows = [("process", "state", "progress", "version", "silent", "still", "restarts", "where")]
    for peer in peers:
        busy = "works" if peer["busy"] else "waits"
        version = str(peer["policy_version"]) if "policy_version" in peer else "-"
        restarts = str(known.get(peer["name"], {}).get("restarts", "-"))
        still = f"{peer['stalled_s']:.1f} s" if peer["busy"] else "-"
        where = f"{peer['host']} pid {peer['pid']}"
        silent = f"{peer['silent_s']:.1f} s"
        rows.append((peer["name"], busy, f"{peer['progress']:,.0f}", version, silent, still, restarts, where))
    joined = {peer["name"] for peer in peers}
    for name, process in known.items():
        if name not in joined and name != BROKER:
            state = "joining" if alive(process["pid"]) else "down"
            rows.append((name, state, "-", "-", "-", "-", str(process["restarts"]), f"pid {process['pid']}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def all_of(section: Mapping[str, Any]) -> str:
    """Return all numbers of a section by name.

    Example:
        >>> all_of({"tasks_queued": 1200, "blocked": ""})
        "tasks_queued 1,200, blocked ''"
    """
    return ", ".join(
        f"{name} {value:,}" if type(value) in (int, float) else f"{name} {value!r}"
        for name, value in section.items()
    )


def queues_line(queues: Mapping[str, int]) -> str:
    """Return what the queues hold now, without those that are empty.

    Example:
        >>> queues_line({"tasks_queued": 0, "tasks_leased": 24, "segments_held": 40, "bytes_held": 1843})
        '24 tasks with actors, 40 segments held (1.8 kB)'
        >>> queues_line({})
        'empty'
    """
    words = {
        "tasks_queued": "tasks queued",
        "tasks_leased": "tasks with actors",
        "units_ready": "units ready",
        "units_leased": "units with the learner",
        "segments_held": "segments held",
    }
    parts = [f"{queues[name]:,} {text}" for name, text in words.items() if queues.get(name)]
    if queues.get("segments_held"):
        parts[-1] += f" ({megabytes(queues.get('bytes_held', 0))})"
    if "room_segments" in queues and not queues["room_segments"]:
        parts.append("no room for more segments")
    return ", ".join(parts) or "empty"


def journal_line(journal: Mapping[str, Any]) -> str:
    """Return the journal's size, and what is unusual about it.

    Example:
        >>> journal_line({"kind": "files", "bytes": 18824, "blocked": "", "why_low": "", "dead_letters": 0})
        '18.8 kB in files'
        >>> journal_line({"kind": "files", "bytes": 18824, "blocked": "disk full", "dead_letters": 2})
        '18.8 kB in files, blocked: disk full, 2 dead letters'
    """
    if "bytes" not in journal:
        return str(journal.get("kind", "none"))
    parts = [f"{megabytes(journal['bytes'])} in files"]
    parts += [
        f"{name}: {journal[key]}"
        for key, name in (("blocked", "blocked"), ("why_low", "low"))
        if journal.get(key)
    ]
    parts += [
        f"{journal[key]:,} {text}"
        for key, text in (("messages_waiting", "messages wait for it"), ("dead_letters", "dead letters"))
        if journal.get(key)
    ]
    return ", ".join(parts)


def ledger_line(ledger: Mapping[str, Any]) -> str:
    """Return the line with the tokens by outcome."""
    parts = [f"{ledger['stored']['tokens']:,} tokens stored", f"{ledger['held_tokens']:,} held"]
    parts += [f"{tally['tokens']:,} {name}" for name, tally in ledger["outcomes"].items() if tally["tokens"]]
    if ledger.get("violation"):
        parts.append(f"VIOLATED: {ledger['violation']}")
    return ", ".join(parts)


def alive(pid: int) -> bool:
    """Return whether this process exists on this host and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False
