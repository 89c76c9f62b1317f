"""The run folder: its configuration, logs, metrics, checkpoints, summary and keys, and how a run goes on from one."""

import contextlib
import fcntl
import json
import logging
import os
import re
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from launch.errors import ConfigError, FolderInUse, NotThereYet
from launch.processes import free_ports
from launch.run_file.sections import RunConfig
from learner.checkpoint_files import find, standing
from learner.errors import CheckpointError
from learner.run_files import BEGAN, CHECKPOINTS, METRICS, RESULT
from protocol.errors import KeysUnusable
from protocol.files import write_whole
from protocol.section import OWN, form_of
from protocol.security import key_files
from protocol.security.addresses import is_loopback, split_endpoint
from protocol.weights.format import host_id

log = logging.getLogger(__name__)

KEYS = "keys"
"""Name of the default keys folder, inside the run folder."""


def keys_folder(config: RunConfig, run_dir: Path) -> Path | None:
    """Return the folder of this run's keys, or None if the run is not encrypted."""
    if not config.security.encrypt:
        return None
    return Path(config.security.keys) if config.security.keys else run_dir / KEYS


def http_keys(config: RunConfig, keys: Path | None) -> Path | None:
    """Return the folder with the certificate and token of the broker's HTTP server.

    None: the server is open to all users of this machine.
    """
    host = config.broker.http.rpartition(":")[0]
    open_here = config.security.http_token == "beyond_loopback" and is_loopback(host)
    return None if open_here else keys


def prepare_keys(config: RunConfig, run_dir: Path, role: str = "broker") -> Path | None:
    """Return the keys folder of a process about to start. Make the keys if the run file names no folder.

    No keys are made on a host where the broker does not run, because the broker would not admit them.

    Raises:
        ConfigError: keys are missing or cannot be made; the text has the cure.
    """
    folder = keys_folder(config, run_dir)
    if folder is None:
        return None
    if not config.security.keys:
        host, _ = split_endpoint(config.broker.endpoint)
        if role == "broker" or not host or is_loopback(host):
            try:
                key_files.make(folder)
            except (OSError, KeysUnusable) as error:
                raise ConfigError(f"keys folder {folder}: {error}") from None
    if not folder.is_dir():
        raise ConfigError(
            f"keys folder {folder}: there is none. Start the broker first if it uses the same folder; else bring the "
            f"keys from its host, where `offbeat keys bundle FOLDER {role} OUT` picks what is needed here, and set "
            "security.keys"
        )
    return folder


CONFIG = "config.json"
ASKED = "config-asked.json"
"""Settings before the head's hardware decided those that are "auto". Other hosts decide them by their own."""
BY_HAND = "config-learner.json"
"""Settings of a learner that was started by hand."""
GIVEN = ("learner.given.content", "learner.taught.content", "learner.family.content")
"""Hashes of files of conversations."""
IDENTITY = ("run.seed", "env.", "model.", "learner.reward.", "learner.family", *GIVEN)
"""Settings without which a run is a different experiment."""
WHOLE = ("env.params", "learner.reward.weights")
"""Tables whose keys are the user's, so that a key that only one side has is a difference, too."""
ELSEWHERE = ("model.cache", "run.dir")
"""Settings that say where something lies, and not what it is."""


class Change(NamedTuple):
    """A setting that differs from the last start of the run."""

    field: str
    before: Any
    now: Any

    def __str__(self) -> str:
        if self.field == "env.content":
            return "a file of the environment (rows, rewards, tools) has changed"
        if self.field in GIVEN:
            return f"the file of {self.field.removesuffix('.content')} has changed"
        if self.field.startswith("learner.") and self.field.endswith(".content"):
            return f"the file of the formula of {self.field.removesuffix('.content')} has changed"
        return f"{self.field} is {json.dumps(self.now)}, it was {json.dumps(self.before)}"


def newest_begun(config: RunConfig) -> Path:
    """Return the newest folder of this run in which a learner has begun: ``dir/name`` or ``dir/name-N``.

    A folder whose run was *named* ``name-N`` belongs to a different run.

    Raises:
        ConfigError: there is none; the text lists folders that look alike.
    """
    base, own = config.run.dir / config.run.name, re.compile(re.escape(config.run.name) + r"(-\d+)?")
    alike = [p for p in config.run.dir.glob(f"{config.run.name}*") if own.fullmatch(p.name)]
    begun = [p for p in alike if (p / "epoch").exists()]
    old = [p for p in begun if run_name(p) == config.run.name]
    if not old:
        others = f" ({', '.join(f'{p.name} is of run {run_name(p)!r}' for p in begun)})" if begun else ""
        raise ConfigError(
            f"--resume: no learner has begun in a run folder {base}{others}; start without --resume"
        )
    # The folder's own time would change with a note or a picture that the user puts there.
    return max(old, key=began_at)


def _begun(config: RunConfig, folder: Path) -> Path:
    """Return a folder that the user names, if a learner of this run has begun in it."""
    if not (folder / "epoch").exists():
        raise ConfigError(f"--resume={folder}: no learner has begun there; name the folder of a run")
    if (name := run_name(folder)) != config.run.name:
        raise ConfigError(
            f"--resume={folder}: it is a folder of run {name!r}, and this run file is of {config.run.name!r}; "
            f"add run.name={name} if it is the right one"
        )
    return _with_its_name(config, folder)


def _with_its_name(config: RunConfig, folder: Path) -> Path:
    """Return a run folder by the name that its journal knows, if the user names it as "." or by a link to it."""
    absolute = Path(os.path.abspath(folder))  # not resolved: a folder may have been moved, and be a link now
    ours = re.compile(re.escape(config.run.name) + r"(-\d+)?")
    if ours.fullmatch(folder.name):
        return folder
    return next((path for path in (absolute, folder.resolve()) if ours.fullmatch(path.name)), folder)


def began_at(folder: Path) -> float:
    """Return when a learner of a run began last, in seconds since 1970."""
    try:
        return float((folder / BEGAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # A run of a version that did not write it.
        return (folder / "epoch").stat().st_mtime


def run_name(folder: Path) -> str:
    """Return the `run.name` that a run folder was made for; the folder's own name if no file says it."""
    saved = saved_settings(folder)
    return str(saved.get("run", {}).get("name", folder.name)) if saved else folder.name


def saved_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the last start of a run, as saved; empty if there are none that can be read."""
    for name in (CONFIG, BY_HAND):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            return content
    return {}


def changes(before: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> Iterator[Change]:
    """Yield the settings that differ. A setting that only one side has is left out, as a version may add it.

    Settings of a formula of the user's own are the user's, so there it is a difference, too.
    A port that the run file leaves open is no difference.

    Example:
        >>> old = {"run": {"seed": 0}, "broker": {"http": "127.0.0.1:4711"}, "learner": {"steps": 9, "gone": 1}}
        >>> new = {"run": {"seed": 7}, "broker": {"http": "127.0.0.1:0"}, "learner": {"steps": 9, "new": 2}}
        >>> [str(change) for change in changes(old, new)]
        ['run.seed is 7, it was 0']
    """
    own = form_of(now) == OWN
    for name in dict.fromkeys([*now, *before]) if own else now:
        if name not in before and not own:
            continue
        old, new, field = before.get(name), now.get(name), f"{above}{name}"
        if isinstance(old, dict) and isinstance(new, dict) and not field.startswith(WHOLE):
            yield from changes(old, new, f"{field}.")
        elif old != new and not (isinstance(new, str) and new.endswith(":0")):
            yield Change(field, old, new)


def what_changed(config: RunConfig, folder: Path, *, accepted: bool) -> list[str]:
    """Return lines on the settings that changed since the last start of a run, and keep the former ones.

    The former settings are kept in ``config-until-step-N.json``.

    Args:
        accepted: the user has accepted a change of the seed, the environment, the model, the rewards, the families
            or the file of given conversations.

    Raises:
        ConfigError: such a change was not accepted; one line for each.
    """
    found = [
        change
        for change in changes(saved_settings(folder), json.loads(config.model_dump_json()))
        if change.field not in ELSEWHERE
    ]
    refused = [change for change in found if change.field.startswith(IDENTITY)]
    if refused and not accepted:
        raise ConfigError("\n".join(_refusal(change, folder) for change in refused))
    if not found:
        return []
    kept = _keep(folder)
    return [
        *(f"changed since the last start: {change}" for change in found),
        f"the former settings are in {kept}",
    ]


def nothing_left(config: RunConfig, folder: Path) -> str:
    """Return a sentence for a run that has done all its steps and is resumed with no more of them; else ""."""
    try:
        done = int(json.loads((folder / RESULT).read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, TypeError, LookupError):
        return ""
    if done < config.learner.steps:
        return ""
    return (
        f"all {config.learner.steps} steps are done, so nothing is left to train: the roles start for a last "
        "evaluation only; raise learner.steps to go on"
    )


def _refusal(change: Change, folder: Path) -> str:
    cure = "change it back, or accept a different experiment with --changed"
    return f"--resume: {change} when {folder} was begun; {cure}"


def _keep(folder: Path) -> Path:
    """Copy the former settings to a file that names the last step that was trained with them."""
    try:
        last = standing(folder / CHECKPOINTS)
    except CheckpointError:
        last = None
    base = f"config-until-step-{last.step if last else 0}"
    path, again = folder / f"{base}.json", 1
    while path.exists():
        again += 1
        path = folder / f"{base}-{again}.json"
    path.write_text(json.dumps(saved_settings(folder), indent=1), encoding="utf-8")
    return path


__all__ = [
    "CONFIG",
    "check_place",
    "check_step",
    "claim",
    "create",
    "holder",
    "in_place",
    "join",
    "load_config",
    "of_first_host",
    "save_config",
    "with_ports",
]

JOURNAL = "journal"


LOCK = "lock"
FAILED_START = "failed-start-"
"""How the name of the folder begins in which the files of a failed start are kept, inside the run folder."""
STAYS = (LOCK, KEYS, "hosts")
"""What a failed start hands on to the next one: tickets name these keys, and hosts may be at work in their folders."""


def in_place(config: RunConfig) -> Path | None:
    """Return the folder ``dir/name`` if a learner has begun in it, so that a scripted start resumes there."""
    base = config.run.dir / config.run.name
    return base if (base / "epoch").exists() else None


def create(
    config: RunConfig, *, resume: bool | Path, only: bool = False, note: Callable[[str], None] = log.info
) -> Path:
    """Make and return a fresh folder ``dir/name`` (or ``name-2``, ...).

    A folder whose start has failed before its learner began is taken instead, because scripts and tickets of that
    start name it. The files of that start are kept in it, in ``failed-start-1`` (or ``failed-start-2``, ...).
    With ``resume``, return instead the newest folder of this run in which a learner has begun, or the named one.

    Args:
        only: no ``name-2`` may be made, because scripts and tickets name ``dir/name``.
        note: shows a sentence to the user.

    Raises:
        ConfigError: there is no folder to resume, the folder cannot be made, or with ``only`` it holds something else.
        FolderInUse: with ``only``: another process holds the folder. Always: it was made by one just now.
    """
    base = config.run.dir / config.run.name
    if isinstance(resume, Path):
        return _begun(config, resume)
    if resume:
        return newest_begun(config)
    folder, n = base, 2
    while folder.exists():
        try:
            if _taken_over(folder, config.run.name, note):
                return folder
        except FolderInUse:
            if only:
                raise
        if only:
            raise ConfigError(
                f"{folder} holds something that no start of run {config.run.name!r} has left, and scripts and tickets "
                "name this folder; move it away, or choose another run.name"
            )
        folder, n = base.with_name(f"{base.name}-{n}"), n + 1
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise FolderInUse(f"{folder} was made by another start just now") from None
    except OSError as error:
        raise _unwritable(config, error) from None
    return folder


def _taken_over(folder: Path, name: str, note: Callable[[str], None]) -> bool:
    """Put the files of a failed start aside. Return False if the folder is of anything else.

    Raises:
        FolderInUse: another process holds it.
    """
    try:
        if not _has_failed(folder, name):
            return False
        with claim(folder):
            # That start may have gone on until the lock was free.
            if not _has_failed(folder, name):
                return False
            left = [path for path in folder.iterdir() if _is_left(path)]
            n = 1
            while (aside := folder / f"{FAILED_START}{n}").exists():
                n += 1
            if left:
                aside.mkdir()
            # The settings go last: if this process ends before, what is still there is known as a failed start's.
            for path in sorted(left, key=lambda path: path.name == CONFIG):
                path.rename(aside / path.name)
    except OSError:
        return False
    if left:
        note(
            f"an earlier start in {folder} ended before its learner had begun; its logs and files are in {aside}"
        )
    return True


def _has_failed(folder: Path, name: str) -> bool:
    """Return whether `offbeat train` has made this folder for the run, and no learner has begun in it."""
    if any((folder / file).exists() for file in ("epoch", BEGAN, METRICS, RESULT)):
        return False
    # Roles by hand do not hold the lock, so they may be at work there.
    if any(path.name != ASKED for path in folder.glob("config-*.json")):
        return False
    if (folder / CONFIG).exists():
        return run_name(folder) == name
    # A start that was killed before it wrote its settings has left the lock, or not even that.
    return not any(map(_is_left, folder.iterdir()))


def _is_left(path: Path) -> bool:
    return path.name not in STAYS and not path.name.startswith(FAILED_START)


def line_to_type(folder: Path) -> str:
    """Return what tells a person how to look at a run.

    Example:
        >>> line_to_type(Path("runs/first try"))
        "to look at it in a browser: offbeat view 'runs/first try'"
    """
    return f"to look at it in a browser: offbeat view {shlex.quote(str(folder))}"


def check_step(folder: Path, step: int) -> None:
    """Make sure that a run has a checkpoint of this learner step.

    Raises:
        ConfigError: it has none; the text lists the steps that there are.
    """
    try:
        find(folder / CHECKPOINTS, step)
    except CheckpointError as error:
        raise ConfigError(f"--from {step}: {error}") from None


def check_place(config: RunConfig) -> None:
    """Make sure that the run folder can be made, on a disk with room. Leaves nothing behind.

    Raises:
        ConfigError: nothing can be written in ``run.dir``, or the disk is nearly full.
    """
    folder = config.run.dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".offbeat-", dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        raise _unwritable(config, error) from None
    needed = config.broker.journal.min_free_bytes
    if free < needed:
        raise ConfigError(
            f"run.dir: the disk of {there} has {megabytes(free)} free, but broker.journal.min_free_bytes is "
            f"{megabytes(needed)}, below which actors may send nothing; free some space, or choose another run.dir"
        )


def megabytes(nbytes: int) -> str:
    """Return a number of bytes as a person reads it.

    Example:
        >>> megabytes(64 << 20), megabytes(20 << 30), megabytes(1843)
        ('67.1 MB', '21.5 GB', '1.8 kB')
    """
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} bytes"


def _unwritable(config: RunConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.dir: cannot write in {config.run.dir} ({error.strerror}); choose a folder that you may write in"
    )


def join(config: RunConfig) -> Path:
    """Return the folder shared by roles that are started by hand; make it if it is missing.

    Ports must be fixed, because no supervisor tells these roles which free ports were chosen.

    Raises:
        ConfigError: a port is 0, or the folder cannot be made.
    """
    for field, value, port in (
        ("broker.endpoint", config.broker.endpoint, 5755),
        ("broker.http", config.broker.http, 5756),
        ("weights.http", config.weights.http, 5757),
        ("judge.http", config.judge.http if config.judge else "", 5758),
    ):
        if value.endswith(":0"):
            raise ConfigError(
                f"{field} is {value!r}: roles started by hand find each other by a fixed port only; "
                f"add an override, for example {field}={value[:-1]}{port}"
            )
    folder = config.run.dir / config.run.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(config, error) from None
    return folder


def of_first_host(config: RunConfig) -> Path:
    """Return the run folder that the first host of the learner has made, for ranks on another host.

    Raises:
        NotThereYet: there is none.
    """
    folder = config.run.dir / config.run.name
    if not folder.is_dir():
        raise NotThereYet(
            f"there is no run folder {folder}: start the first host of the learner, which makes it, and put run.dir on "
            "a file system that all hosts of the learner share"
        )
    return folder


def with_ports(config: RunConfig) -> RunConfig:
    """Return the configuration with a free port wherever the run file says 0."""
    judge = config.judge
    addresses = config.broker.endpoint, config.broker.http, config.weights.http, judge.http if judge else ""
    endpoint, broker_http, weights_http, judge_http = (
        re.sub(r":0$", f":{port}", address) for address, port in zip(addresses, free_ports(4), strict=True)
    )
    broker = config.broker.model_copy(update={"endpoint": endpoint, "http": broker_http})
    weights = config.weights.model_copy(update={"http": weights_http})
    judge = judge.model_copy(update={"http": judge_http}) if judge else None
    return config.model_copy(update={"broker": broker, "weights": weights, "judge": judge})


def save_config(config: RunConfig, path: Path) -> None:
    """Write the configuration in force, whole or not at all."""
    write_whole(path, config.model_dump_json(indent=1), shared=True)


def load_config(path: Path) -> RunConfig:
    """Read the configuration that `save_config` wrote."""
    return RunConfig.model_validate_json(path.read_text(encoding="utf-8"))


def claim(folder: Path) -> IO[str]:
    """Lock the folder for this process. The lock ends when the returned file is closed or the process ends.

    The file says who holds it, for `holder`. It proves nothing: a process that has said so may be alive on a machine
    that does not answer. So a folder whose lock is held is never taken, whoever holds it.

    Raises:
        FolderInUse: another process holds the lock; the text says which, and what to do.
        ConfigError: the file system has no locks.
    """
    lock = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (held until the process ends)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            raise FolderInUse(f"{folder} is in use by {_holder(lock)}") from None
    except OSError as error:
        lock.close()
        raise ConfigError(
            f"run.dir: {lock.name} cannot be locked ({error.strerror}); mount the file system with locks (Lustre: the "
            "option flock), or choose another run.dir"
        ) from None
    # On a full disk the words are missing, and the lock is held all the same.
    with contextlib.suppress(OSError):
        os.ftruncate(lock.fileno(), 0)
        words = f"process {os.getpid()} on {socket.gethostname()}\n{host_id()}"
        os.write(lock.fileno(), words.encode())
        # Other machines that share the folder read it while it is held.
        os.fsync(lock.fileno())
    return lock


def refuse_other_holder(folder: Path) -> None:
    """Find out that another process has taken a folder which this one has claimed.

    A network file system frees the lock of a machine that does not answer, and then gives it to the next process. The
    machine may come back. Its writes to other files than the lock still succeed, so it has to look.

    Raises:
        FolderInUse: the lock names another process.
    """
    try:
        with open(folder / LOCK, encoding="utf-8") as lock:
            # While this process has the file open for writing, NFS would go on reading what is in its cache.
            os.posix_fadvise(lock.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            said = lock.read(200)
    except OSError:
        return
    # A machine may get another name while it runs.
    mine = said.startswith(f"process {os.getpid()} on ") and said.endswith(f"\n{host_id()}")
    # It is empty for a moment while its new holder writes, and on a full disk.
    if said and not mine:
        raise FolderInUse(
            f"{folder} is in use by {said.partition(chr(10))[0]}: the file system has taken this machine for dead and "
            "has given the lock away; the run goes on there"
        )


def holder(folder: Path) -> str:
    """Return who holds the lock of a folder, and what to do about it; "" if nobody does."""
    if not (folder / LOCK).exists():
        return ""
    try:
        claim(folder).close()
    except FolderInUse as error:
        return str(error)
    except OSError:
        return ""
    return ""


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    said, _, boot = lock.read(200).partition("\n")
    since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(os.fstat(lock.fileno()).st_mtime))
    who = f" ({said}, since {since})" if said else ""
    # Not by the machine's name: pods of a StatefulSet have the same one on every node.
    if not boot or boot == host_id():
        return f"a run that has not ended{who}; it has to end first"
    return (
        f"a run that has not ended{who}. If that machine is dead, NFS 4 frees the lock after its lease (90 s unless "
        f"set otherwise), NFS 3 when the machine is back; if it never comes back, remove {lock.name}"
    )
