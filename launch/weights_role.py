"""The process that serves policy versions to other hosts. Its clients cannot slow the learner down."""

import asyncio
import logging
import signal
import socket
from pathlib import Path

from launch.run_file.sections import RunConfig
from learner.run_files import SHARED_MEMORY, weights_folder
from protocol.security.addresses import split_address
from protocol.weights.format import version_folder
from protocol.weights.server import WeightsServer, serving, url_for_others

log = logging.getLogger(__name__)

WEIGHTS = "weights"


def weights_url(config: RunConfig, keys: Path | None) -> str:
    """Return the URL of the learner's versions, or "" if only the learner's host has them."""
    if not config.weights.http:
        return ""
    host, _, port = config.weights.http.rpartition(":")
    own = config.weights.advertised_host
    return url_for_others(own or host.strip("[]"), int(port), socket.gethostname(), keys)


def serve_weights(config: RunConfig, folder: Path, keys: Path | None) -> None:
    """Serve the learner's folder of versions until SIGTERM or SIGINT.

    Raises:
        AddressRefused: other hosts could reach the address, and there is no token to ask for.
    """
    host, port = split_address("weights.http", config.weights.http, keys)
    versions = weights_folder(folder)
    scratch = SHARED_MEMORY if versions.parent == SHARED_MEMORY else folder
    server = WeightsServer(folder.name, lambda _, version: version_folder(versions, version), scratch, keys)
    asyncio.run(_serve(server, host, port))


async def _serve(server: WeightsServer, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(server, host, port) as at:
        log.info("versions are served at %s:%d", host, at)
        await stop.wait()
