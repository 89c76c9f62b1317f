"""`offbeat status`: shows the processes, their progress, and who waits for whom.

If the broker does not answer, it shows what the run folder records.
"""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from launch.commands.ended import ended_page, seconds_since_end, summary_of
from launch.commands.find_run import CONFIGS, find, supervised_now
from launch.commands.status_page import alive, page
from launch.errors import NoAnswer
from launch.logs import plain
from launch.processes.child import tail
from launch.supervise.broker_status import fetch
from launch.supervise.health import BROKER
from launch.supervise.state_file import read_state

WATCH_S = 1.0
TIMEOUT_S = 3.0
CLEAR = "\x1b[H\x1b[2J"


def show(target: str, *, watch: bool, as_json: bool, keys: Path | None = None, verbose: bool = False) -> int:
    """Print the status of a run once, or every second. Return the exit code: 0 if its broker answers.

    A run that has ended is shown by its summary, once, with exit code 0.

    Args:
        target: run folder, or address of the broker; "": the newest run.
        verbose: show all numbers of the queues and the journal, not only what is unusual.
        keys: folder with the token; None: the run's own keys folder, if ``target`` is a run folder.

    Raises:
        ConfigError: ``target`` is neither a run folder nor an address.
    """
    folder, http, own = find(target)
    keys = keys or own
    # A shell starts background jobs of a script with SIGINT ignored, but SIGINT must end --watch there, too.
    if watch:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        if folder is not None and (summary := ended(folder)) is not None:
            since = seconds_since_end(folder)
            text = json.dumps({"ended": summary}, indent=1) if as_json else ended_page(summary, since)
            sys.stdout.write(plain(text) + "\n")
            return 0
        try:
            status = fetch(http, TIMEOUT_S, keys=keys)
            text = json.dumps(status, indent=1) if as_json else page(status, read_state(folder), verbose)
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


def ended(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a run that has ended and that no supervisor holds, else None."""
    return None if supervised_now(folder) else summary_of(folder, [folder / name for name in CONFIGS])


def without_answer(why: str, folder: Path | None) -> list[str]:
    """Return what is known of a run whose broker does not answer."""
    facts = [f"the broker does not answer: {why}"]
    if folder is None:
        return [*facts, "name its run folder on its host to see what is known there"]
    known = read_state(folder)
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
