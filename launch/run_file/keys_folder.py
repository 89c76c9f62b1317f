"""Where a run's keys are, and how they are made before a process starts."""

from pathlib import Path

from launch.errors import ConfigError
from launch.run_file.sections import RunConfig
from protocol.errors import KeysUnusable
from protocol.security import key_files
from protocol.security.addresses import is_loopback, split_endpoint

KEYS = "keys"
"""In the run folder."""


def keys_folder(config: RunConfig, run_dir: Path) -> Path | None:
    """Where this run's keys are; None: it is not encrypted."""
    if not config.security.encrypt:
        return None
    return Path(config.security.keys) if config.security.keys else run_dir / KEYS


def http_keys(config: RunConfig, keys: Path | None) -> Path | None:
    """The folder whose certificate and token the broker's HTTP asks for; None: it is open to all of this machine."""
    host = config.broker.http.rpartition(":")[0]
    open_here = config.security.http_token == "beyond_loopback" and is_loopback(host)
    return None if open_here else keys


def prepare_keys(config: RunConfig, run_dir: Path, role: str = "broker") -> Path | None:
    """The keys folder of a process that is about to start; made, where the run file names none.

    On a host that the broker does not run on nothing is made: those keys would open nothing.

    Raises:
        ConfigError: there are no keys where there should be some; the text has the cure.
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
