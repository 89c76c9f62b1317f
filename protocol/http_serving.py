"""What the HTTP servers of a run have in common: strangers hold no connection for long, and fill no log."""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

IDLE_S = 30.0
"""A connection without a whole request for so long is closed; aiohttp's own limit is an hour."""


class _OfOurs(logging.Filter):
    """Leaves out what is no HTTP: whoever reaches the port could write a traceback into the log with each line."""

    def filter(self, record: logging.LogRecord) -> bool:
        from aiohttp.http_exceptions import HttpProcessingError

        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


def app_runner(application: "web.Application", *, shutdown_s: float) -> "web.AppRunner":
    """A runner for an application, without signal handlers.

    Args:
        shutdown_s: requests that are going on at the end get so long.
    """
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
