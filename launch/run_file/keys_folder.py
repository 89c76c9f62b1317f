"""Folder of a run's keys: finds it, and makes the keys before a process starts."""

from pathlib import Path

from launch.errors import ConfigError
from launch.run_file.sections import RunConfig
from protocol.errors import KeysUnusable
from protocol.security import key_files
from protocol.security.addresses import is_loopback, split_endpoint

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
