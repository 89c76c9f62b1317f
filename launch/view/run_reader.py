"""Reads the files of a run folder, again and again while the run goes on. It writes nothing there and takes no lock.

The lock of the supervisor is looked up in the kernel's table, because a reader that took it for a moment could keep a
run from starting.
"""

import json
import math
import os
import platform
import re
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from launch.commands.status import CONFIGS, alive, over_lines, summary_of
from launch.file_tail import FileTail
from launch.run_file.sections import RunConfig
from launch.run_folder import BY_HAND, load_config
from launch.supervise.crew import read_state
from learner.run_files import METRICS, PID_FILE
from learner.samples import OLDER_SAMPLES_FILE, SAMPLES_FILE, Sample, decode_line

NOTE = "note"
MAX_METRICS = 4_096
"""Most names of metrics that are kept. An environment can make up any number of them."""
MAX_NOTES = 1_000
MAX_SAMPLES = 20_000
HOST_FOLDERS = "hosts/*"
"""Folders of further hosts in the run folder. A host on another machine writes there if they share a file system."""
LOG_BYTES = 256 << 10
"""Bytes of the end of each log that are read."""
MAX_LOG_LINES = 2_000
"""Most lines that are kept of a log, and shown of all."""

State = Literal["running", "ended", "broken off"]


class Columns:
    """Rows of numbers by name. A value that a row lacks is NaN: missing is not zero.

    Example:
        >>> columns = Columns()
        >>> columns.add({"step": 1, "loss": 0.5}); columns.add({"step": 2, "reward": 1.0})
        >>> list(columns["step"]), list(columns["loss"]), columns.last("reward"), columns.last("other")
        ([1.0, 2.0], [0.5, nan], 1.0, None)
    """

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self.rows = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row; what is not a number is left out."""
        for name, value in row.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MAX_METRICS:
                    continue
                column = self._columns[name] = array("d")
            if len(column) < self.rows:
                column.extend([math.nan] * (self.rows - len(column)))
            column.append(value)
        self.rows += 1

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> "array[float]":
        """Return a column, as long as there are rows; all NaN if no row has the name. It is not to be changed."""
        column = self._columns.get(name)
        if column is None:
            return array("d", [math.nan]) * self.rows
        # The newest rows may lack it, and later ones have it.
        column.extend([math.nan] * (self.rows - len(column)))
        return column

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def last(self, name: str) -> float | None:
        """Return the newest value that is a number, or None."""
        return next((value for value in reversed(self._columns.get(name, ())) if not math.isnan(value)), None)

    def recent(self, name: str, count: int) -> list[float]:
        """Return the newest ``count`` values that are numbers, the oldest first."""
        found: deque[float] = deque(maxlen=count)
        found.extend(
            value for value in self._columns.get(name, array("d"))[-8 * count :] if not math.isnan(value)
        )
        return list(found)


@dataclass
class Note:
    """A sentence that the learner wrote for a person."""

    step: float
    text: str
    at: float | None


@dataclass(frozen=True)
class Process:
    """A process that a supervisor has started, on the head or on another host of the run."""

    host: str
    """Name of the host; "": the head, where the learner runs."""
    name: str
    machine: str
    """Name of the machine that the host is; "" in records of an earlier version."""
    pid: int
    alive: bool | None
    """None: it is on another machine than the viewer, so nobody here can look."""
    supervised: bool
    """Whether its supervisor works on this machine."""
    restarts: int
    reason: str
    """Why it ended last; "" if it never did."""
    started: float | None
    endings: list[dict[str, Any]]
    """Time and reason of its newest ends."""

    @property
    def where(self) -> str:
        """Its name, and its host if that is not the head."""
        return f"{self.name} on host {self.host}" if self.host else self.name


def processes_of(record: Mapping[str, Any], host: str, *, supervised: bool) -> list[Process]:
    """Return the processes in the record of a supervisor, in its order; what is not as it should be is left out."""
    machine = str(record.get("machine", ""))
    # The head is asked of this machine's kernel, as `offbeat status` does.
    elsewhere = bool(host) and machine != platform.node()
    found, known = [], record.get("processes", {})
    for name, one in known.items() if isinstance(known, dict) else ():
        if not isinstance(one, dict):
            continue
        pid, restarts, started, endings = (one.get(key) for key in ("pid", "restarts", "started", "endings"))
        pid = pid if isinstance(pid, int) else 0
        found.append(
            Process(
                host=host,
                name=name,
                machine=machine,
                pid=pid,
                alive=None if elsewhere else pid > 0 and alive(pid),
                supervised=supervised,
                restarts=restarts if isinstance(restarts, int) else 0,
                reason=str(one.get("last_reason") or ""),
                started=started if isinstance(started, int | float) else None,
                endings=[end for end in endings if isinstance(end, dict)]
                if isinstance(endings, list)
                else [],
            )
        )
    return found


@dataclass
class RunFiles:
    """What the files of a run folder say, except the journal and the logs."""

    name: str
    folder: Path
    config: RunConfig | None = None
    """None if the settings are of another version and cannot be read; `config_text` still has them."""
    config_text: dict[str, Any] = field(default_factory=dict)
    steps: Columns = field(default_factory=Columns)
    """One row for each learner step."""
    beginnings: int = 0
    """How often `steps` began anew, because a learner went back and cut the file."""
    evaluations: Columns = field(default_factory=Columns)
    """One row for each evaluation."""
    notes: list[Note] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    supervisor: dict[str, Any] = field(default_factory=dict)
    """The record of the head's supervisor."""
    state: State = "broken off"
    why_over: list[str] = field(default_factory=list)
    """What is known of a run that has ended without a summary."""
    processes: list[Process] = field(default_factory=list)
    """Those of the head, then those of each further host whose folder is below this one."""
    disk_free_bytes: int | None = None

    @property
    def bound(self) -> int | None:
        """Bound on the policy lag; None if the settings cannot be read."""
        return None if self.config is None else self.config.max_policy_lag


class RunReader:
    """Reads one run folder. `read` is cheap if nothing has changed."""

    def __init__(self, folder: Path) -> None:
        self.files = RunFiles(name=folder.resolve().name, folder=folder)
        self._metrics = FileTail()
        self._samples = FileTail()
        self._older_seen = (0, 0)
        self._config_seen = (0, 0)

    def read(self) -> RunFiles:
        """Take what is new in the files, and return all that is known."""
        files = self.files
        self._read_config()
        self._read_metrics()
        self._read_samples()
        folder = files.folder
        files.supervisor = read_state(folder)
        held = is_locked(folder / "lock") or _supervises(files.supervisor.get("pid"), b"train")
        files.processes = processes_of(files.supervisor, "", supervised=held)
        for host in sorted(folder.glob(HOST_FOLDERS)):
            record = read_state(host)
            held_there = is_locked(host / "lock") or _supervises(record.get("pid"), b"host")
            files.processes += processes_of(record, host.name, supervised=held_there)
        files.summary = (
            None if held else summary_of(folder, [p for n in CONFIGS if (p := folder / n).exists()])
        )
        files.why_over = [] if held or files.summary else over_lines(folder)
        if held or (not files.summary and not files.why_over and _learner_alive(folder)):
            files.state = "running"
        else:
            files.state = "ended" if files.summary or files.why_over else "broken off"
        try:
            space = os.statvfs(folder)
            files.disk_free_bytes = space.f_bavail * space.f_frsize
        except OSError:
            files.disk_free_bytes = None
        return files

    def _read_config(self) -> None:
        folder = self.files.folder
        known = [path for name in (*CONFIGS, BY_HAND) if (path := folder / name).exists()]
        if not known:
            return
        newest = max(known, key=lambda path: path.stat().st_mtime)
        stat = newest.stat()
        if (stat.st_mtime_ns, stat.st_ino) == self._config_seen:
            return
        self._config_seen = (stat.st_mtime_ns, stat.st_ino)
        try:
            self.files.config_text = dict(json.loads(newest.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError):
            self.files.config_text = {}
        try:
            self.files.config = load_config(newest)
        except (OSError, ValueError, RecursionError):
            self.files.config = None

    def _read_metrics(self) -> None:
        anew, lines = self._metrics.new_lines(self.files.folder / METRICS)
        files = self.files
        if anew:
            files.steps, files.evaluations, files.notes = Columns(), Columns(), []
            files.beginnings += 1
        for text in lines:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if not isinstance(line, dict) or not isinstance(line.get("step"), int | float):
                continue
            if NOTE in line:
                if len(files.notes) < MAX_NOTES:
                    files.notes.append(Note(line["step"], str(line[NOTE]), time_of(line)))
            elif "learner/policy_version" in line or "learner/loss" in line:
                files.steps.add(line)
            elif any(name.startswith("evaluation/") for name in line):
                files.evaluations.add(line)

    def _read_samples(self) -> None:
        files = self.files
        try:
            stat = (files.folder / OLDER_SAMPLES_FILE).stat()
            older = (stat.st_ino, stat.st_size)
        except OSError:
            older = (0, 0)
        anew, lines = self._samples.new_lines(files.folder / SAMPLES_FILE)
        if anew or older != self._older_seen:
            self._older_seen, files.samples = older, []
            files.samples = _samples(_lines_of(files.folder / OLDER_SAMPLES_FILE))
            if not anew:
                # The newer file was rotated meanwhile; read it whole.
                self._samples = FileTail()
                _, lines = self._samples.new_lines(files.folder / SAMPLES_FILE)
        files.samples += _samples(lines)
        del files.samples[:-MAX_SAMPLES]


def time_of(line: Mapping[str, Any]) -> float | None:
    """Return when a line was written, in seconds since 1970; None in files of an earlier version."""
    at = line.get("time")
    return float(at) if isinstance(at, int | float) and not isinstance(at, bool) else None


def _lines_of(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError:
        return []


def _samples(lines: Iterable[bytes]) -> list[Sample]:
    return [sample for line in lines if (sample := decode_line(line)) is not None]


def is_locked(path: Path) -> bool:
    """Return whether a process of this host holds the lock of a file, without taking it.

    Example:
        >>> import fcntl, tempfile
        >>> file = tempfile.NamedTemporaryFile()
        >>> is_locked(Path(file.name))
        False
        >>> fcntl.flock(file, fcntl.LOCK_EX)
        >>> is_locked(Path(file.name))
        True
    """
    try:
        stat = path.stat()
        table = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    place = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    # A line of a process that waits for a lock has an arrow behind its number.
    return any(place in words and "->" not in words for words in map(str.split, table.splitlines()))


def _supervises(pid: Any, command: bytes) -> bool:
    """Return whether this process is that command of Offbeat. Some file systems hide locks from the kernel's table."""
    try:
        words = Path(f"/proc/{int(pid)}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError, TypeError):
        return False
    return command in words and alive(int(pid))


def _learner_alive(folder: Path) -> bool:
    """Return whether a learner that was started by hand lives; it is younger than the last start."""
    try:
        return alive(int((folder / PID_FILE).read_text()))
    except (OSError, ValueError):
        return False


# --- settings -----------------------------------------------------------------------------------------------


def changed_settings(config: RunConfig) -> list[dict[str, Any]]:
    """Return the settings that differ from their default, with both values as JSON.

    A section that is absent by default is one row for each of its settings, without a default.
    """
    rows: list[dict[str, Any]] = []
    _changed(config, "", rows)
    return rows


def _changed(section: BaseModel, prefix: str, rows: list[dict[str, Any]]) -> None:
    shown = section.model_dump(mode="json")
    for name, declared in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            _changed(value, f"{prefix}{name}.", rows)
            continue
        required = declared.is_required()
        default = None if required else declared.get_default(call_default_factory=True, validated_data={})
        if required or value != default:
            rows.append(
                {
                    "setting": prefix + name,
                    "value": json.dumps(shown[name]),
                    "default": "" if required else json.dumps(_plain(default)),
                }
            )


def _plain(value: Any) -> Any:
    return (
        value.model_dump(mode="json")
        if isinstance(value, BaseModel)
        else json.loads(json.dumps(value, default=str))
    )


def flat_settings(text: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return all settings of a configuration by their full name, as JSON.

    Example:
        >>> flat_settings({"run": {"seed": 1, "name": "a"}, "judge": None})
        {'run.seed': '1', 'run.name': '"a"', 'judge': 'null'}
    """
    rows: dict[str, str] = {}
    for name, value in text.items():
        if isinstance(value, Mapping) and value:
            rows |= flat_settings(value, f"{prefix}{name}.")
        else:
            rows[prefix + str(name)] = json.dumps(value)
    return rows


# --- logs ---------------------------------------------------------------------------------------------------

_LOG_LINE = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) +(.*)", re.DOTALL
)
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass
class _Log:
    """The newest lines of one log that were read so far."""

    inode: int
    offset: int
    lines: deque[tuple[str, int, dict[str, str]]] = field(default_factory=lambda: deque(maxlen=MAX_LOG_LINES))
    count: int = 0
    at: str = ""
    level: str = "INFO"
    rest: bytes = b""
    """Beginning of a line that is not written whole."""


class LogReader:
    """Reads the logs of a run folder, of each only what is new since the last look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[Path, _Log] = {}

    def lines(self, *, process: str = "", level: str = "") -> list[dict[str, str]]:
        """Return the newest lines of all logs, merged by time; a line without one stays with the line before it.

        Args:
            process: only of this process; "": of all.
            level: only of this level or above.
        """
        least = LEVELS.index(level) if level in LEVELS else 0
        merged: list[tuple[str, int, dict[str, str]]] = []
        # The name comes from a user of the page, so it only selects among the files that are there.
        for path in sorted(
            [*self._folder.glob("logs/*.log"), *self._folder.glob(f"{HOST_FOLDERS}/logs/*.log")]
        ):
            if not process or path.stem == process:
                found = self._read(path)
                merged += [line for line in found if not least or LEVELS.index(line[2]["level"]) >= least]
        merged.sort(key=lambda line: line[:2])
        return [line for _, _, line in merged[-MAX_LOG_LINES:]]

    def _read(self, path: Path) -> deque[tuple[str, int, dict[str, str]]]:
        try:
            with open(path, "rb") as file:
                stat = os.fstat(file.fileno())
                log = self._logs.get(path)
                if log is None or stat.st_ino != log.inode or stat.st_size < log.offset:
                    begin = max(0, stat.st_size - LOG_BYTES)
                    log = self._logs[path] = _Log(stat.st_ino, begin)
                    file.seek(begin)
                    if begin:
                        # Its first line may be cut.
                        log.offset += len(file.readline(LOG_BYTES))
                elif stat.st_size - log.offset > LOG_BYTES:
                    log.offset, log.rest = stat.st_size - LOG_BYTES, b""
                file.seek(log.offset)
                data = file.read(LOG_BYTES)
        except OSError:
            return deque()
        log.offset += len(data)
        *whole, log.rest = (log.rest + data)[-2 * LOG_BYTES :].split(b"\n")
        for line in whole:
            self._take(log, path.stem, line)
        if not log.rest:
            return log.lines
        shown = _Log(0, 0, log.lines.copy(), log.count, log.at, log.level)
        self._take(shown, path.stem, log.rest)
        return shown.lines

    @staticmethod
    def _take(log: _Log, process: str, line: bytes) -> None:
        text = line.decode("utf-8", "backslashreplace")
        if match := _LOG_LINE.match(text):
            log.at, log.level = f"{match[1]}.{match[2]}", match[3]
            text = match[4]
        log.count += 1
        if text:
            entry = {"at": log.at, "process": process, "level": log.level, "text": text[:4_000]}
            log.lines.append((log.at, log.count, entry))
