"""Serve the pages `/status` and `/metrics` over HTTP."""

import time
from pathlib import Path
from typing import Any

from aiohttp import web

from broker.output_commit import OutputCommit
from broker.status import prometheus, status
from protocol.security.guard import Guard
from protocol.security.http_token import require_token


class HttpPages:
    """The broker's HTTP pages. With keys for HTTP, a client must send the token.

    Args:
        guard: who may connect to the broker's socket; None without encryption.
    """

    def __init__(self, output_commit: OutputCommit, guard: Guard | None, http_keys: Path | None) -> None:
        self._output_commit, self._dispatcher = output_commit, output_commit.dispatcher
        self._guard, self._http_keys = guard, http_keys

    def app(self) -> web.Application:
        """Return the application to serve."""
        app = web.Application(client_max_size=1024, middlewares=[require_token(self._http_keys)])
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _status(self, _: web.Request) -> web.Response:
        page = status(
            self._dispatcher,
            time.monotonic(),
            journal=self._output_commit.status(),
            security=self._security(),
        )
        return web.json_response(page)

    def _security(self) -> dict[str, Any]:
        if self._guard is None:
            return {"encrypted": False}
        admission = self._guard.admission
        admission.reload(time.monotonic())
        return {
            "encrypted": True,
            "keys_admitted": len(admission.allowed),
            "handshakes_refused": dict(admission.refused),
        }

    async def _metrics(self, _: web.Request) -> web.Response:
        text = prometheus(self._dispatcher, time.monotonic())
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
