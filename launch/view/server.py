"""Serves the page and the answers to its questions over HTTP."""

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from broker.errors import JournalError
from launch.errors import BadQuestion, ConfigError, NotKept
from launch.view.gate import HEADERS, Gate
from launch.view.questions import Questions
from protocol.errors import KeysUnusable
from protocol.security.addresses import is_loopback
from protocol.security.http import TokenCheck, serving

log = logging.getLogger(__name__)

ASSETS = Path(__file__).parent / "assets"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
PAGE = "index.html"
LOGIN = "login.html"
SHUTDOWN_S = 1.0
ANSWER_S = 60.0
"""Longest time of an answer."""
MAX_QUESTION = 8_000
"""Longest address that is answered."""
COMPRESSED_BYTES = 8 << 10
"""Answers that are longer are compressed; for others it is not worth the time."""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Address:
    """Where the page is served, and how to log in there."""

    host: str
    port: int
    url: str
    """Link to type or click. What stands behind the # never leaves the browser."""


def login_check(host: str, keys: Path | None) -> tuple[Callable[[str], bool], str]:
    """Return who may log in, and the secret for the link; the secret is "" where the run's token is asked for.

    Args:
        host: address that is to be served.
        keys: keys folder with certificate and token.

    Raises:
        ConfigError: the address can be reached from other machines and there are no keys, or they cannot be used.
    """
    if keys is not None:
        try:
            return TokenCheck(keys).admits, ""
        except KeysUnusable as error:
            raise ConfigError(f"--keys: {error}") from None
    if not is_loopback(host):
        raise ConfigError(
            f"--listen {host}: other machines could read the run there. Name the run's keys with --keys FOLDER, so "
            "that the page has TLS and asks for the run's token; or leave --listen out and use `ssh -L`: "
            "docs/run/view.md"
        )
    secret = secrets.token_urlsafe(32)
    expected = f"Bearer {secret}".encode()
    return lambda given: hmac.compare_digest(given.encode("utf-8", "replace"), expected), secret


@asynccontextmanager
async def view_server(
    questions: Questions, host: str, port: int, keys: Path | None
) -> AsyncIterator[Address]:
    """Serve runs until the context is left; yield where.

    Raises:
        ConfigError: see `login_check`.
        OSError: the address cannot be bound.
        KeysUnusable: the keys folder lacks the certificate or the token.
    """
    admits, secret = login_check(host, keys)
    gate = Gate(host, port, keys is not None, admits)
    questions.start()
    try:
        async with serving(application(questions, gate), host, port, keys, shutdown_s=SHUTDOWN_S) as bound:
            gate.port = bound
            name = f"[{host}]" if ":" in host else host
            link = f"{'https' if keys is not None else 'http'}://{name}:{bound}/login"
            yield Address(host, bound, f"{link}#{secret}" if secret else link)
    finally:
        # It waits for the threads of the journals for some seconds at most; nothing else is served any more.
        questions.close()


def application(questions: Questions, gate: Gate) -> web.Application:
    """Return the application: assets, the login, and one handler for all questions."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        names = ("Host", "Origin", "Sec-Fetch-Site", "Sec-Fetch-Mode")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        refusal = gate.refusal(request.method, request.path, headers, request.cookies.get(gate.cookie, ""))
        if refusal is not None:
            response: web.StreamResponse = web.Response(status=refusal.status, text=refusal.text)
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = web.Response(status=error.status, text=f"{error.status}: {error.reason}\n")
        response.headers.update(HEADERS)
        return response

    async def asset(request: web.Request) -> web.Response:
        name = request.match_info.get("name") or PAGE
        return file_response(LOGIN if name == "login" else name)

    async def login(request: web.Request) -> web.Response:
        value = gate.login(request.headers.get("Authorization", ""))
        if value is None:
            return web.Response(status=401, text="401: the secret is wrong\n")
        response = web.Response(text="ok\n")
        response.set_cookie(
            gate.cookie, value, httponly=True, samesite="Strict", secure=gate.encrypted, path="/"
        )
        return response

    def answered(question: str, given: dict[str, str]) -> bytes:
        return _encode(questions.ask(question, given))

    async def ask(request: web.Request) -> web.Response:
        if len(request.path_qs) > MAX_QUESTION:
            return _error(414, "the address is too long")
        given = {name: request.query[name] for name in request.query}
        try:
            # A question may read much of a journal; others are answered meanwhile.
            async with asyncio.timeout(ANSWER_S):
                body = await asyncio.to_thread(answered, request.match_info["question"], given)
        except TimeoutError:
            return _error(
                503, f"the answer takes longer than {ANSWER_S:g} s; the machine is busy, so try again"
            )
        except BadQuestion as error:
            return _error(400, str(error))
        except (NotKept, JournalError) as error:
            return _error(404, str(error))
        except Exception as error:
            log.exception("%s could not be answered", request.match_info["question"][:40])
            return _error(500, f"a fault of the viewer, its terminal has the details: {type(error).__name__}")
        # A page that is open asks again and again, and mostly nothing has changed.
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers={"ETag": tag})
        response = web.Response(body=body, content_type="application/json", headers={"ETag": tag})
        if len(body) > COMPRESSED_BYTES:
            response.enable_compression()
        return response

    app = web.Application(middlewares=[guard], client_max_size=1024)
    app.router.add_get("/", asset)
    app.router.add_get("/api/login", login)
    app.router.add_get("/api/{question:[a-z]+}", ask)
    app.router.add_get("/{name:[a-z0-9-]+(?:\\.[a-z0-9]+)*}", asset)
    return app


def file_response(name: str) -> web.Response:
    """Return one of the page's files. The name is looked up in a list, so it cannot lead out of the folder."""
    known = {path.name: path for path in ASSETS.iterdir() if path.suffix in TYPES}
    if name not in known:
        return web.Response(status=404, text="404: there is no such file\n")
    return web.Response(
        body=known[name].read_bytes(), content_type=TYPES[known[name].suffix], charset="utf-8"
    )


def _error(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=_encode({"error": text}), content_type="application/json")
