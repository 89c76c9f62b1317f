"""`offbeat status`: finds a run, shows its processes and their progress, who waits for whom, or how it ended.

If the broker does not answer, it shows what the run folder records.
"""

import fcntl
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.errors import FINAL, ConfigError, NoAnswer, read_note, read_reason
from launch.logs import plain
from launch.processes import tail
from launch.run_file.sections import RunConfig
from launch.run_folder import BY_HAND, CONFIG, http_keys, keys_folder, load_config, megabytes
from launch.supervise.broker_status import fetch
from launch.supervise.crew import read_state
from launch.supervise.health import BROKER, PEERS, role_of
from launch.supervise.posts import LEARNER
from launch.supervise.progress import MetricsTail, episodes_lines, nothing_trained
from launch.supervise.summary import summary_rows
from learner.run_files import METRICS, RESULT

CONFIGS = (CONFIG, f"config-{BROKER}.json")
"""Configuration files that `offbeat train` and a broker started by hand write to the run folder."""


def find_run(target: str) -> tuple[Path | None, str, Path | None]:
    """Return run folder, address and keys folder of a target: a folder, a URL, host:port, or "" (newest run).

    Raises:
        ConfigError: there is no such run.
    """
    if target.startswith(("http://", "https://")):
        return None, target.removesuffix("/").removesuffix("/status"), None
    folder = Path(target) if target else newest_run(Path("runs"))
    if not folder.is_dir():
        host, _, port = target.rpartition(":")
        if host and port.isdecimal():
            return None, target, None
        raise ConfigError(
            f"{target!r} is neither a run folder nor an address; write for example runs/NAME, or 127.0.0.1:5756"
        )
    config = config_of(folder)
    return folder, config.broker.http, http_keys(config, keys_folder(config, folder))


def newest_run(runs: Path) -> Path:
    """Return the run folder that was started last.

    Raises:
        ConfigError: there is no run folder.
    """
    found = [path for path in runs.glob("*") if any((path / name).exists() for name in CONFIGS)]
    if not found:
        raise ConfigError(
            f"there is no run in {runs.resolve()}; name its folder, or the address of its broker"
        )
    return max(
        found, key=lambda path: max(p.stat().st_mtime for name in CONFIGS if (p := path / name).exists())
    )


def config_of(folder: Path) -> RunConfig:
    """Return the settings with which a run was last started.

    Raises:
        ConfigError: the folder is not a run folder.
    """
    known = [path for name in CONFIGS if (path := folder / name).exists()]
    if not known:
        raise ConfigError(f"{folder} is not a run folder: it holds neither {' nor '.join(CONFIGS)}")
    return load_config(max(known, key=lambda path: path.stat().st_mtime))


def supervised_now(folder: Path) -> bool:
    """Return whether a supervisor (`offbeat train`) holds this run folder."""
    try:
        with open(folder / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


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
        *hosts_lines(status.get("hosts", ())),
        *fleet_lines(status),
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
        leaves = peer.get("leaving") or known.get(peer["name"], {}).get("leaving")
        busy = "leaving" if leaves else "works" if peer["busy"] else "waits"
        # Only generators have one, and nobody knows it before the first heartbeat.
        version = "-" if peer.get("policy_version") is None else str(peer["policy_version"])
        restarts = str(known.get(peer["name"], {}).get("restarts", "-"))
        still = f"{peer['stalled_s']:.1f} s" if peer["busy"] else "-"
        where = f"{peer['host']} pid {peer['pid']}"
        silent = f"{peer['silent_s']:.1f} s"
        rows.append((peer["name"], busy, f"{peer['progress']:,.0f}", version, silent, still, restarts, where))
    joined = {peer["name"] for peer in peers}
    for name, process in known.items():
        if name not in joined and name != BROKER:
            state = "down"
            if alive(process["pid"]):
                joins = role_of(name) in PEERS
                # A process that drains leaves the broker before it ends.
                state = "leaving" if process.get("leaving") else "joining" if joins else "works"
            rows.append((name, state, "-", "-", "-", "-", str(process["restarts"]), f"pid {process['pid']}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def fleet_lines(status: Mapping[str, Any]) -> list[str]:
    """Return the line on how many generators and actors the run needs; nothing before the first look.

    Example:
        >>> peers = [{"role": "generator"}, {"role": "actor"}]
        >>> advice = {"generators": 3, "actors": 1, "reason": "the learner is idle 60% of the time", "measured": True}
        >>> fleet_lines({"peers": peers, "fleet": {"wanted": advice}})[1]
        'fleet    3 generators wanted (1 now), 1 actor wanted: the learner is idle 60% of the time'
        >>> advice |= {"measured": False, "reason": "not measured"}
        >>> fleet_lines({"peers": peers, "fleet": {"wanted": advice}})[1]
        'fleet    not measured'
    """
    advice = status.get("fleet", {}).get("wanted")
    if not advice:
        return []
    if not advice["measured"]:
        return ["", f"fleet    {advice['reason']}"]
    parts = []
    for role in ("generator", "actor"):
        count = advice[f"{role}s"]
        here = sum(peer["role"] == role and not peer.get("leaving") for peer in status["peers"])
        now = "" if here == count else f" ({here} now)"
        parts.append(f"{count} {role}{'' if count == 1 else 's'} wanted{now}")
    return ["", f"fleet    {', '.join(parts)}: {advice['reason']}"]


def hosts_lines(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of hosts, with the last death on each; nothing if all processes are beside the learner.

    Example:
        >>> one = {"name": "gpu7", "job": "slurm 12_3", "generators": 1, "actors": 2, "tokens_per_second": 1234.5}
        >>> one |= {"policy_lag": 1, "joined_s": 250.0, "restarts": 1, "died": "actor-gpu7-0 ended with code 1"}
        >>> print("\\n".join(hosts_lines([one]))[1:])
        host  job         generators  actors  tokens/s  lag  joined     restarts
        gpu7  slurm 12_3  1           2       1,234     1    4 min ago  1
          gpu7: last death: actor-gpu7-0 ended with code 1
    """
    if not hosts:
        return []
    rows = [("host", "job", "generators", "actors", "tokens/s", "lag", "joined", "restarts")]
    deaths = []
    for one in hosts:
        lag = "-" if one["policy_lag"] is None else str(one["policy_lag"])
        counts = str(one["generators"]), str(one["actors"]), f"{one['tokens_per_second']:,.0f}"
        rows.append(
            (one["name"], one["job"] or "-", *counts, lag, ago(one["joined_s"]), str(one["restarts"]))
        )
        if one["died"]:
            first, *more = one["died"].splitlines()
            deaths += [f"  {one['name']}: last death: {first}", *(f"    {line}" for line in more)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return ["", *lines, *deaths]


def tasks_lines(values: Mapping[str, Any]) -> list[str]:
    """Return the line on the tasks of a run that chooses them by the answers; nothing for other runs.

    Example:
        >>> tasks_lines({"selection/unknown_share": 0.25, "selection/never_share": 0.5, "selection/always_share": 0.25})
        ['tasks    25 % unknown, 50 % never right, 25 % always right']
        >>> tasks_lines({"selection/instructions": 3, "selection/best_instruction": 0,
        ...              "selection/best_instruction_share": 0.92})
        ['notes    3 instructions left; the one at place 0 has 92 % of the groups']
        >>> tasks_lines({"learner/loss": 0.0})
        []
    """
    if "selection/instructions" in values:
        left, place = values["selection/instructions"], values.get("selection/best_instruction", 0)
        share = values.get("selection/best_instruction_share", 0.0)
        return [
            f"notes    {left:.0f} instructions left; the one at place {place:.0f} has {100 * share:.0f} % of the "
            "groups",
            *_proposal_lines(values),
        ]
    words = {
        "unknown": "unknown",
        "never": "never right",
        "below_half": "right below half the time",
        "above_half": "right half the time or more",
        "always": "always right",
    }
    shares = {text: values.get(f"selection/{name}_share", 0.0) for name, text in words.items()}
    parts = [f"{100 * share:.0f} % {text}" for text, share in shares.items() if share]
    informative = values.get("selection/informative_share")
    if parts and informative is not None:
        parts[-1] += f"; {100 * informative:.0f} % of the last groups had different returns"
    return [f"tasks    {', '.join(parts)}"] if parts else []


def _proposal_lines(values: Mapping[str, Any]) -> list[str]:
    """Return the line on the instructions that the policy proposed; nothing if it proposes none.

    Example:
        >>> _proposal_lines({"selection/proposals": 20, "selection/proposals_unreadable": 4,
        ...                  "selection/proposals_repeated": 11, "selection/proposals_taken": 3,
        ...                  "selection/proposed_share": 0.5})
        ['         20 proposed, 16 readable, 11 repeated, 3 taken; proposed ones have 50 % of the groups']
    """
    if "selection/proposals" not in values:
        return []
    made, unreadable, repeated, taken = (
        values.get(f"selection/proposals{part}", 0.0) for part in ("", "_unreadable", "_repeated", "_taken")
    )
    share = values.get("selection/proposed_share", 0.0)
    return [
        f"         {made:.0f} proposed, {made - unreadable:.0f} readable, {repeated:.0f} repeated, {taken:.0f} taken; "
        f"proposed ones have {100 * share:.0f} % of the groups"
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


SUMMARY = "summary.json"
BEGUN = (*CONFIGS, BY_HAND, "epoch")
"""Files that are written when a run, or a learner of it, begins."""


def over_lines(folder: Path) -> list[str]:
    """Return what is known of a run whose learner has ended for good and that has no summary; empty if it goes on.

    A learner that was started by hand has no supervisor that would write a summary, and a full disk may prevent one.
    """
    result, note = folder / RESULT, folder / f"{LEARNER}.exit"
    head = f"run {folder.resolve().name} is over: "
    if _is_newest(result, folder):
        try:
            first, *rows = _lines_of(json.loads(result.read_text(encoding="utf-8")), folder)
        except (LookupError, TypeError):
            # A file of another version of Offbeat, or of a program that is no learner.
            first, rows = "the result has not what a learner writes", [f"  result                 {result}"]
        except (OSError, ValueError):
            return []
        return [head + first, *rows]
    if _is_newest(note, folder) and read_note(folder, LEARNER) == FINAL:
        return [f"{head}the learner ended for good: {read_reason(folder, LEARNER) or 'it gave no reason'}"]
    return []


def _lines_of(known: Mapping[str, Any], folder: Path) -> list[str]:
    """Return how a run ended, and rows on the result that its learner, or `offbeat eval`, has written.

    Raises:
        LookupError, TypeError: it lacks a field.
    """
    ended_by = str(known["ended_by"])
    where = f"  result                 {folder / RESULT}"
    if "policy_version" not in known:
        # An evaluation by `offbeat eval`, which trains nothing and has no summary.
        return [ended_by, f"  sets evaluated         {len(known['evaluations'])}", where]
    if not known["steps"]:
        return [nothing_trained(ended_by, known.get("episodes", {}))]
    rows = [f"  steps, policy version  {known['steps']:,}, {known['policy_version']:,}"]
    rows += [f"  model                  {folder / 'model'}"] if (folder / "model").is_dir() else []
    return [ended_by, *rows, f"{where} (there is no {SUMMARY})"]


def _is_newest(path: Path, folder: Path) -> bool:
    """Return whether a file was written since the run, or its learner, began last."""
    try:
        written = path.stat().st_mtime
    except OSError:
        return False
    return all(file.stat().st_mtime <= written for name in BEGUN if (file := folder / name).exists())


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


WATCH_S = 1.0
TIMEOUT_S = 3.0
CLEAR = "\x1b[H\x1b[2J"


def show(target: str, *, watch: bool, as_json: bool, keys: Path | None = None, verbose: bool = False) -> int:
    """Print the status of a run once, or every second. Return the exit code: 0 if its broker answers.

    A run that has ended is shown by its summary, once, with exit code 0, or by the learner's result if it has none.

    Args:
        target: run folder, or address of the broker; "": the newest run.
        verbose: show all numbers of the queues and the journal, not only what is unusual.
        keys: folder with the token; None: the run's own keys folder, if ``target`` is a run folder.

    Raises:
        ConfigError: ``target`` is neither a run folder nor an address.
    """
    folder, http, own = find_run(target)
    keys = keys or own
    # A shell starts background jobs of a script with SIGINT ignored, but SIGINT must end --watch there, too.
    if watch:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    metrics = MetricsTail()
    while True:
        if folder is not None and (summary := ended(folder)) is not None:
            since = seconds_since_end(folder)
            text = json.dumps({"ended": summary}, indent=1) if as_json else ended_page(summary, since)
            sys.stdout.write(plain(text) + "\n")
            return 0
        if folder is not None and not supervised_now(folder) and (lines := over_lines(folder)):
            lines += still_there(http, keys)
            text = json.dumps({"over": lines}, indent=1) if as_json else "\n".join(lines)
            sys.stdout.write(plain(text) + "\n")
            return 0
        try:
            status = fetch(http, TIMEOUT_S, keys=keys)
            text = json.dumps(status, indent=1) if as_json else page(status, read_state(folder), verbose)
            if folder is not None and not as_json:
                metrics.read(folder / METRICS)
                text = "\n".join([text, *tasks_lines(metrics.values)])
            code = 0
        except NoAnswer as error:
            if folder is not None and (lines := over_lines(folder)):
                # The broker has left, and the supervisor is about to: it writes the summary.
                lines.append("its supervisor ends the other processes")
                text, code = json.dumps({"over": lines}, indent=1) if as_json else "\n".join(lines), 0
            else:
                facts = without_answer(str(error), folder)
                known = json.dumps({"error": str(error), "known": facts}, indent=1)
                text, code = known if as_json else "\n".join(facts), 1
        sys.stdout.write((CLEAR if watch and sys.stdout.isatty() else "") + plain(text) + "\n")
        sys.stdout.flush()
        if not watch:
            return code
        time.sleep(WATCH_S)


def still_there(http: str, keys: Path | None) -> list[str]:
    """Return a line on the processes of a run that is over, if its broker still answers."""
    try:
        peers = fetch(http, TIMEOUT_S, keys=keys)["peers"]
    except NoAnswer:
        return []
    names = ", ".join(sorted(str(peer["name"]) for peer in peers)) or "nobody else"
    return [f"its broker still answers, and has {names}: end them with Ctrl-C in their terminals"]


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
    # The path in supervisor.json is relative to the folder in which the run began.
    log = folder / "logs" / f"{BROKER}.log"
    text = tail(log)
    facts.append(f"the end of {log}:\n{text}" if text else f"there is no {log}")
    return facts
