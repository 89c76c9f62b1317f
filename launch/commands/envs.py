"""`offbeat envs`: serves the environment of a run file to actors of other hosts."""

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from actors.environments import LiveSuite
from actors.errors import Infrastructure
from envs.base import Suite
from envs.errors import EnvError, ServiceFailed
from envs.registry import content_hash, files_of, make_suite
from envs.remote.server import EnvironmentServer, Served
from envs.user_code import code_file
from launch import logs
from launch.errors import ConfigError
from launch.run_file.load import load
from launch.run_file.sections import RunConfig
from protocol.errors import AddressRefused, KeysUnusable
from protocol.security.addresses import is_loopback, split_address
from protocol.security.http import scheme, serving

log = logging.getLogger(__name__)

LOOK_S = 1.0
SHUTDOWN_S = 2.0
CALLS = 256
"""Plain functions of environments that may run at the same time."""


def serve_envs(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C, and return the exit code.

    Raises:
        ConfigError: the run file, the environment, the address or the keys cannot be used.
    """
    config = load(args.run_file, overrides)
    host, port = _address(args.listen, args.keys)
    logs.configure("envs")
    try:
        asyncio.run(_serve(config, host, port, args.keys))
    except EnvError as error:
        raise ConfigError(f"env: {error}") from None
    except KeysUnusable as error:
        raise ConfigError(f"--keys: {error}") from None
    except OSError as error:
        raise ConfigError(f"--listen {args.listen}: {error.strerror or error}") from None
    return 0


def _address(listen: str, keys: Path | None) -> tuple[str, int]:
    """Return host and port, and refuse an address that strangers could reach.

    Example:
        >>> _address("0.0.0.0:5760", None)
        Traceback (most recent call last):
        launch.errors.ConfigError: --listen 0.0.0.0:5760: other hosts can reach it, and there is no token; make \
keys with `offbeat keys make FOLDER`, and start with --keys FOLDER
    """
    if keys is None and not is_loopback(listen.rpartition(":")[0]):
        raise ConfigError(
            f"--listen {listen}: other hosts can reach it, and there is no token; make keys with `offbeat keys make "
            "FOLDER`, and start with --keys FOLDER"
        )
    try:
        return split_address("--listen", listen, keys)
    except AddressRefused as error:
        raise ConfigError(str(error)) from None


async def _serve(config: RunConfig, host: str, port: int, keys: Path | None) -> None:
    stopped, why = asyncio.Event(), list[str]()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)

    def make() -> Suite:
        return make_suite(config.env.name, config.env.params)

    def give_up(reason: str) -> None:
        why.append(reason)
        stopped.set()

    timeout_s = config.actor.env_timeout_s
    live = LiveSuite(make, calls=CALLS, timeout_s=timeout_s, on_failure=give_up)
    served = Served(
        ready=live.ready,
        about={"name": config.env.name, "suite": fingerprint_of(config.env.name, config.env.params)},
        timeout_s=timeout_s,
        gauges=lambda: live.gauges,
        blameless=(ServiceFailed, Infrastructure),
        keys=keys,
    )
    try:
        application = EnvironmentServer(served).application
        async with serving(application, host, port, keys, shutdown_s=SHUTDOWN_S) as bound:
            at = f"[{host}]" if ":" in host else host
            sys.stdout.write(f"serving {config.env.name} at {scheme(keys)}://{at}:{bound}\n")
            sys.stdout.flush()
            await _watch(live, stopped)
    finally:
        await live.close()
    if why:
        raise EnvError(why[0])


async def _watch(live: LiveSuite, stopped: asyncio.Event) -> None:
    """Look after the suite until the server is stopped."""
    while not stopped.is_set():
        live.look()
        try:
            async with asyncio.timeout(LOOK_S):
                await stopped.wait()
        except TimeoutError:
            continue


def fingerprint_of(name: str, params: dict[str, Any]) -> str:
    """Return a hash that is equal for equal environments, in whatever folders their files are.

    Example:
        >>> fingerprint_of("calculator", {"seed": 1}) == fingerprint_of("calculator", {"seed": 2})
        False
    """
    text = json.dumps([name, params], sort_keys=True, default=str)
    for path in filter(None, [code_file(name), *files_of(name, params)]):
        text = text.replace(json.dumps(path)[1:-1], Path(path).name)
    return blake2b(f"{text} {content_hash(name, params)}".encode(), digest_size=8).hexdigest()
