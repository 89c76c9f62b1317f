"""What the HTTP servers of a run have in common: TLS, a token, and strangers who hold no connection for long."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.http_tls import server_context

if TYPE_CHECKING:
    from aiohttp import web

IDLE_S = 30.0
"""A connection without a whole request for so long is closed; aiohttp's own limit is an hour."""
HANDSHAKE_S = 10.0


class _OfOurs(logging.Filter):
    """Leaves out what is no HTTP: whoever reaches the port could write a traceback into the log with each line."""

    def filter(self, record: logging.LogRecord) -> bool:
        from aiohttp.http_exceptions import HttpProcessingError

        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


@contextlib.asynccontextmanager
async def serving(
    application: "web.Application", host: str, port: int, keys: Path | None, *, shutdown_s: float
) -> AsyncIterator[int]:
    """Serve an application until the context is left; gives the port, which is another than ``port`` where that is 0.

    Args:
        keys: keys folder with the certificate; None: HTTP without TLS.
        shutdown_s: requests that are going on at the end get so long.

    Raises:
        OSError: the address cannot be bound.
        KeysUnusable: the folder lacks the certificate.
    """
    runner = _runner(application, shutdown_s)
    context = None if keys is None else server_context(keys)
    await runner.setup()
    try:
        assert runner.server is not None
        server = await asyncio.get_running_loop().create_server(
            runner.server,
            host,
            port,
            ssl=context,
            ssl_handshake_timeout=None if context is None else HANDSHAKE_S,
        )
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()
    finally:
        await runner.cleanup()


def _runner(application: "web.Application", shutdown_s: float) -> "web.AppRunner":
    from aiohttp import web

    log = logging.getLogger(f"{__name__}.requests")
    if not log.filters:
        log.addFilter(_OfOurs())
    return web.AppRunner(
        application,
        access_log=None,
        logger=log,
        handle_signals=False,
        keepalive_timeout=IDLE_S,
        shutdown_timeout=shutdown_s,
    )
