"""Serves the versions that this host has fetched to other hosts: only whole, verified versions."""

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from actors.config import GeneratorConfig
from actors.generator.listening import endpoint_for_actors
from actors.generator.weights.cache import Cache
from protocol.security.addresses import split_address
from protocol.security.http_tls import scheme
from protocol.weights.server import WeightsServer, serving

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def relay(
    config: GeneratorConfig, cache: Cache, run: str, broker: str, keys: Path | None
) -> AsyncIterator[str]:
    """Serve this host's cache while the context lasts. Yield the URL for other hosts, or "" if there is none.

    Raises:
        AddressRefused: other hosts could reach the server, but the run has no keys and so no token.
        OSError: the address cannot be bound.
        KeysUnusable: the folder lacks the certificate or its private key.
    """
    if not config.weights_http:
        yield ""
        return
    host, port = split_address("generator.weights_http", config.weights_http, keys)
    server = WeightsServer(run, cache.locate, cache.folder.parent, keys)
    async with serving(server, host, port) as bound:
        at = endpoint_for_actors(
            f"tcp://{f'[{host}]' if ':' in host else host}:{bound}", config.advertised_host, broker
        )
        url = at.replace("tcp://", f"{scheme(keys)}://", 1)
        log.info("versions of this host are served at %s", url)
        yield url
