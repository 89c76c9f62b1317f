"""Finds the run that a verb looks into: its folder, its settings, and whether a supervisor holds it."""

import fcntl
from pathlib import Path

from launch.errors import ConfigError
from launch.resuming import CONFIG
from launch.run_file.keys_folder import http_keys, keys_folder
from launch.run_file.sections import RunConfig
from launch.run_folder import load_config
from launch.supervise.health import BROKER

CONFIGS = (CONFIG, f"config-{BROKER}.json")
"""Configuration files that `offbeat train` and a broker started by hand write to the run folder."""


def find(target: str) -> tuple[Path | None, str, Path | None]:
    """Return run folder, address and keys folder of a target: a folder, a URL, host:port, or "" (newest run).

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
