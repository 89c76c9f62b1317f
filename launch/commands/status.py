"""`offbeat status`: who is there, how far they are, who waits for whom; and what is known when nobody answers."""

import fcntl
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.errors import ConfigError, NoAnswer
from launch.logs import plain
from launch.processes import tail
from launch.run_file.keys_folder import http_keys, keys_folder
from launch.run_file.sections import RunConfig
from launch.run_folder import CONFIG, load_config
from launch.supervise.broker_status import fetch
from launch.supervise.crew import STATE_FILE
from launch.supervise.health import BROKER

WATCH_S = 1.0
TIMEOUT_S = 3.0
CLEAR = "\x1b[H\x1b[2J"
CONFIGS = (CONFIG, f"config-{BROKER}.json")
"""Of `offbeat train`, and of a broker started by hand."""


def show(target: str, *, watch: bool, as_json: bool, keys: Path | None = None) -> int:
    """Print the status of a run once, or again and again; returns the exit code: 0 if its broker answers.

    Args:
        keys: folder with the token; None: that of the run, if ``target`` is its folder.

    Raises:
        ConfigError: ``target`` is neither a run folder nor an address.
    """
    folder, http, own = find(target)
    keys = keys or own
    if watch:  # a script's background job ignores it, and could not be ended as the help says
        signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            status = fetch(http, TIMEOUT_S, keys=keys)
            text = json.dumps(status, indent=1) if as_json else page(status, crew(folder))
            code = 0
        except NoAnswer as error:
            facts = without_answer(str(error), folder)
            text = (
                json.dumps({"error": str(error), "known": facts}, indent=1) if as_json else "\n".join(facts)
            )
            code = 1
        sys.stdout.write((CLEAR if watch and sys.stdout.isatty() else "") + plain(text) + "\n")
        sys.stdout.flush()
        if not watch:
            return code
        time.sleep(WATCH_S)


def find(target: str) -> tuple[Path | None, str, Path | None]:
    """Run folder, address and keys folder of what a user names: a folder, a URL, host:port; "": the newest run.

    Raises:
        ConfigError: there is no such run.
    """
    if target.startswith(("http://", "https://")):
        return None, target.removesuffix("/").removesuffix("/status"), None
    folder = Path(target) if target else newest(Path("runs"))
    if not folder.is_dir():
        host, _, port = target.rpartition(":")
        if host and port.isdecimal():
            return None, target, None
        raise ConfigError(
            f"{target!r} is neither a run folder nor an address; write for example runs/NAME, or 127.0.0.1:5756"
        )
    config = config_of(folder)
    return folder, config.broker.http, http_keys(config, keys_folder(config, folder))


def newest(runs: Path) -> Path:
    """The run folder that was begun last."""
    found = [path for path in runs.glob("*") if any((path / name).exists() for name in CONFIGS)]
    if not found:
        raise ConfigError(
            f"there is no run in {runs.resolve()}; name its folder, or the address of its broker"
        )
    return max(
        found, key=lambda path: max(p.stat().st_mtime for name in CONFIGS if (p := path / name).exists())
    )


def config_of(folder: Path) -> RunConfig:
    """The settings of a run, as it was started last.

    Raises:
        ConfigError: the folder is not of a run.
    """
    known = [path for name in CONFIGS if (path := folder / name).exists()]
    if not known:
        raise ConfigError(f"{folder} is not a run folder: it holds neither {' nor '.join(CONFIGS)}")
    return load_config(max(known, key=lambda path: path.stat().st_mtime))


def crew(folder: Path | None) -> dict[str, Any]:
    """What the supervisor has noted of its processes; empty without one."""
    try:
        return dict(json.loads((folder / STATE_FILE).read_text())) if folder else {}
    except (OSError, ValueError):
        return {}


def page(status: Mapping[str, Any], supervised: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        supervised: content of ``supervisor.json``, for restarts; may be empty.
    """
    lines = [
        f"run {status['run']}: policy version {status['policy_version']}, learner's epoch {status['epoch']}",
        "",
        *table(status["peers"], supervised),
        "",
        "waits",
        *(f"  {line}" for line in status["waits"] or ["nobody waits"]),
        "",
        "queues   " + ", ".join(f"{name} {value:,}" for name, value in status["queues"].items()),
        "ledger   " + ledger_line(status["ledger"]),
        "journal  " + ", ".join(f"{name} {value}" for name, value in status.get("journal", {}).items()),
    ]
    return "\n".join(lines)


def table(peers: Sequence[Mapping[str, Any]], supervised: Mapping[str, Any]) -> list[str]:
    """Rows of processes: those that have joined, and those that should have."""
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


def ledger_line(ledger: Mapping[str, Any]) -> str:
    """Tokens by what became of them."""
    parts = [f"{ledger['stored']['tokens']:,} tokens stored", f"{ledger['held_tokens']:,} held"]
    parts += [f"{tally['tokens']:,} {name}" for name, tally in ledger["outcomes"].items() if tally["tokens"]]
    if ledger.get("violation"):
        parts.append(f"VIOLATED: {ledger['violation']}")
    return ", ".join(parts)


def without_answer(why: str, folder: Path | None) -> list[str]:
    """What can be said of a run whose broker does not answer."""
    facts = [f"the broker does not answer: {why}"]
    if folder is None:
        return [*facts, "name its run folder on its host to see what is known there"]
    known = crew(folder)
    broker = known.get("processes", {}).get(BROKER, {})
    held = supervised_now(folder)
    if broker:
        state = "lives" if alive(broker["pid"]) else "is gone"
        facts.append(f"it should be process {broker['pid']}, which {state}")
    if known:
        facts.append(
            f"the supervisor (process {known['pid']}) "
            + (
                "lives and starts it again"
                if held
                else "is gone: go on with `offbeat train RUN_FILE --resume`"
            )
        )
    else:
        facts.append(
            "the run was not started by `offbeat train`; start its broker again by hand, with the same run.name"
        )
    log = Path(broker.get("log") or folder / "logs" / f"{BROKER}.log")
    text = tail(log)
    facts.append(f"the end of {log}:\n{text}" if text else f"there is no {log}")
    return facts


def supervised_now(folder: Path) -> bool:
    """Whether an `offbeat train` holds this run folder."""
    try:
        with open(folder / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def alive(pid: int) -> bool:
    """Whether there is such a process on this host, and it is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False
