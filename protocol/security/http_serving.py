"""Common part of the HTTP servers of a run: TLS, and limits on how long a stranger holds a connection."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import KeysUnusable
from protocol.security.http_tls import (
    CERTIFICATE_FILE,
    PRIVATE_FILE,
    CertificateStamp,
    certificate_stamp,
    server_context,
)

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

IDLE_S = 30.0
"""Seconds after which a connection without a whole request is closed; aiohttp's own limit is an hour."""
HANDSHAKE_S = 10.0
GOODBYE_S = 1.0
"""Seconds that the other side has to end a TLS connection that the server closes."""
LOOK_S = 0.5


class _HttpErrorFilter(logging.Filter):
    """Filter against tracebacks for bytes that are not HTTP: any stranger could fill the log with them."""

    def filter(self, record: logging.LogRecord) -> bool:
        from aiohttp.http_exceptions import HttpProcessingError

        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


@contextlib.asynccontextmanager
async def serving(
    application: "web.Application", host: str, port: int, keys: Path | None, *, shutdown_s: float
) -> AsyncIterator[int]:
    """Serve an application until the context is left, and yield the bound port.

    Args:
        port: port to bind; 0 lets the system choose.
        keys: keys folder with the certificate; None: HTTP without TLS.
        shutdown_s: seconds that running requests get at the end.

    Raises:
        OSError: the address cannot be bound.
        KeysUnusable: the folder lacks the certificate.
    """
    runner = _runner(application, shutdown_s)
    await runner.setup()
    try:
        assert runner.server is not None
        async with _tls(keys) as tls:
            server = await asyncio.get_running_loop().create_server(runner.server, host, port, **tls)
            try:
                yield int(server.sockets[0].getsockname()[1])
            finally:
                server.close()
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _tls(keys: Path | None) -> AsyncIterator[dict[str, Any]]:
    """Yield the TLS arguments of a server, and load the certificate again soon after it was replaced."""
    if keys is None:
        yield {}
        return
    seen = certificate_stamp(keys)
    context = server_context(keys)
    task = asyncio.create_task(_reload_certificate(context, keys, seen), name="certificate")
    try:
        yield {"ssl": context, "ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": GOODBYE_S}
    finally:
        task.cancel()


async def _reload_certificate(context: ssl.SSLContext, keys: Path, shown: CertificateStamp) -> None:
    complained_of = shown
    while True:
        await asyncio.sleep(LOOK_S)
        if (now := certificate_stamp(keys)) == shown:
            continue
        try:
            # Check first that both halves are there and belong together.
            server_context(keys)
            context.load_cert_chain(keys / CERTIFICATE_FILE, keys / PRIVATE_FILE)
            shown = now
        except (OSError, KeysUnusable) as error:
            # The files are being replaced, or are gone. Keep the old certificate, log it once, and try again.
            if now != complained_of:
                log.warning("the certificate stays as it was: %s", error)
            complained_of = now


def _runner(application: "web.Application", shutdown_s: float) -> "web.AppRunner":
    from aiohttp import web

    requests = logging.getLogger(f"{__name__}.requests")
    if not requests.filters:
        requests.addFilter(_HttpErrorFilter())
    return web.AppRunner(
        application,
        access_log=None,
        logger=requests,
        handle_signals=False,
        keepalive_timeout=IDLE_S,
        shutdown_timeout=shutdown_s,
    )
