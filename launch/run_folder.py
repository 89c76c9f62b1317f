"""The run folder: the resolved configuration, logs, metrics, checkpoints, summary."""

import fcntl
import re
import shutil
import tempfile
from pathlib import Path
from typing import IO

from launch.errors import ConfigError, NotThereYet
from launch.processes.ports import free_ports
from launch.resuming import CONFIG, newest_begun
from launch.run_file.sections import RunConfig
from learner.checkpoint_files import find
from learner.errors import CheckpointError
from learner.run_files import CHECKPOINTS
from protocol.files import write_whole

__all__ = [
    "CONFIG",
    "check_place",
    "check_step",
    "claim",
    "create",
    "join",
    "load_config",
    "of_first_host",
    "save_config",
    "with_ports",
]

JOURNAL = "journal"


def create(config: RunConfig, *, resume: bool) -> Path:
    """Make and return a fresh folder ``dir/name`` (or ``name-2``, ...).

    With ``resume``, return instead the newest folder of this run in which a learner has begun.

    Raises:
        ConfigError: there is no folder to resume, or the folder cannot be made.
    """
    base = config.run.dir / config.run.name
    if resume:
        return newest_begun(config)
    folder, n = base, 2
    while folder.exists():
        folder, n = base.with_name(f"{base.name}-{n}"), n + 1
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(config, error) from None
    return folder


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

    Raises:
        ConfigError: another run is using the folder.
    """
    lock = open(folder / "lock", "w")  # noqa: SIM115 (held until the process ends)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(f"{folder} is in use by a run that has not ended") from None
    return lock
