"""Passes on to other hosts what this host has fetched: whole, verified versions only."""

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
    """Serve a host's cache for as long as the context lasts; gives the URL for others, empty where none is served.

    Raises:
        AddressRefused: other hosts could reach it, and there is no token to ask for.
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
