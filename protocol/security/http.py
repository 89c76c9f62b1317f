"""Security of a run's HTTP servers: a bearer token, TLS with one self-signed certificate, and limits for strangers."""

import asyncio
import contextlib
import datetime
import hmac
import ipaddress
import logging
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import KeysUnusable
from protocol.security.keys import refuse_changeable, refuse_open_secret, unreadable

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler, Middleware


log = logging.getLogger(__name__)

TOKEN_FILE = "http.token"
TOKEN_BYTES = 32
MAX_TOKENS = 8
MAX_FILE_BYTES = 4_096
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="offbeat"'}
REFUSAL = (
    "401: this server asks for a token; send the header that `offbeat keys header FOLDER` prints, where FOLDER is the "
    "keys folder of the run\n"
)


def read_tokens(keys: Path) -> list[str]:
    """Read the tokens of a keys folder; the first is the one to send.

    Raises:
        KeysUnusable: there is no token, a line is not a token, or others can read or change the file.
    """
    path = keys / TOKEN_FILE
    try:
        with open(path, "rb") as file:
            refuse_open_secret(path, os.fstat(file.fileno()).st_mode)
            lines = file.read(MAX_FILE_BYTES).decode("ascii").split()
        if lines and len(lines) <= MAX_TOKENS and all(len(bytes.fromhex(t)) >= TOKEN_BYTES for t in lines):
            return lines
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError:
        pass
    raise KeysUnusable(
        f"{path}: a line is not {TOKEN_BYTES} bytes in hex; make it anew with `offbeat keys rotate {keys} http`"
    )


def authorization_header(keys: Path | None) -> dict[str, str]:
    """Return the header for a request to a server of this run; empty if the run has no keys.

    Raises:
        KeysUnusable: see `read_tokens`.

    Example:
        >>> authorization_header(None)
        {}
    """
    return {} if keys is None else {"Authorization": f"Bearer {read_tokens(keys)[0]}"}


class TokenCheck:
    """Check of the Authorization header of requests.

    Args:
        keys: keys folder; None admits every request.

    Raises:
        KeysUnusable: see `read_tokens`.

    Example:
        >>> TokenCheck(None).admits("")
        True
    """

    def __init__(self, keys: Path | None) -> None:
        self._keys = keys
        self._tokens: list[bytes] = []
        self._seen: tuple[int, int] | None = None
        if keys is not None:
            self._read_anew_if_changed(keys)

    def admits(self, authorization: str) -> bool:
        """Return whether the header has a valid token. The comparison takes constant time for all tokens."""
        if self._keys is None:
            return True
        try:
            self._read_anew_if_changed(self._keys)
        except (OSError, KeysUnusable) as error:
            # The file is being replaced, or is gone: the tokens known so far stay valid.
            log.warning("the token stays as it was: %s", error)
        scheme, _, said = authorization.partition(" ")
        given = said.strip().encode("utf-8", "replace")
        # Always compare with all tokens, so that the time tells nothing.
        good = [hmac.compare_digest(given, token) for token in self._tokens]
        return scheme.lower() == "bearer" and any(good)

    def _read_anew_if_changed(self, keys: Path) -> None:
        try:
            stat = (keys / TOKEN_FILE).stat()
        except FileNotFoundError:
            self._seen = None
            # This raises, with the cure, unless the file has just come back.
            self._tokens = [token.encode() for token in read_tokens(keys)]
            return
        seen = (stat.st_mtime_ns, stat.st_ino)
        if seen != self._seen:
            self._tokens = [token.encode() for token in read_tokens(keys)]
            self._seen = seen


def require_token(keys: Path | None) -> "Middleware":
    """Return a middleware for aiohttp that answers 401 to requests without a token of this keys folder.

    Use it as ``web.Application(middlewares=[require_token(keys)])``. Without a keys folder it admits every
    request.

    Raises:
        KeysUnusable: the folder has no token.
    """
    from aiohttp import web

    check = TokenCheck(keys)

    @web.middleware
    async def authorize(request: "web.Request", handler: "Handler") -> "web.StreamResponse":
        if not check.admits(request.headers.get("Authorization", "")):
            refusal = web.Response(status=401, text=REFUSAL, headers=CHALLENGE)
            refusal.force_close()
            return refusal
        return await handler(request)

    return authorize


CERTIFICATE_FILE = "http.crt"
PRIVATE_FILE = "http.key"
SERVER_NAME = "offbeat"
"""Name in the certificate, for clients that need one.

Prometheus takes it as ``server_name``, curl by ``--connect-to``.
"""
LOCAL_NAMES = ("127.0.0.1", "::1")
# So early that the certificate is valid on hosts whose clocks are behind, too.
FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
# The value that RFC 5280, 4.1.2.5, reserves for a certificate without an end.
UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


def new_private_key() -> bytes:
    """Make a private key (ECDSA, P-256), as PEM."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_of(private: bytes) -> bytes:
    """Make a self-signed certificate of a private key, both as PEM.

    Raises:
        KeysUnusable: the bytes are not an unencrypted private key of an elliptic curve.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_private_key(private, None)
    except (ValueError, TypeError) as error:
        # An encrypted key raises TypeError.
        raise KeysUnusable(
            f"{PRIVATE_FILE}: {error}; make it anew with `offbeat keys rotate FOLDER tls`"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KeysUnusable(
            f"{PRIVATE_FILE}: not a key of an elliptic curve; make it anew with `offbeat keys rotate FOLDER tls`"
        )
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, SERVER_NAME)])
    names = [x509.DNSName(SERVER_NAME), x509.DNSName("localhost")]
    addresses = [x509.IPAddress(ipaddress.ip_address(address)) for address in LOCAL_NAMES]
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), FROM, UNTIL
    ).add_extension(x509.SubjectAlternativeName([*names, *addresses]), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def server_context(keys: Path) -> ssl.SSLContext:
    """Return the TLS 1.3 context of a server of the run that this keys folder belongs to.

    Raises:
        KeysUnusable: there is no certificate, or others can read its private key, or the two do not match.
    """
    certificate, private = keys / CERTIFICATE_FILE, keys / PRIVATE_FILE
    try:
        refuse_open_secret(private, private.stat().st_mode)
    except OSError as error:
        raise unreadable(private, error) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, private)
    except ssl.SSLError as error:
        raise KeysUnusable(
            f"{certificate} and {private.name} are not of one pair ({error.reason}); make both anew with "
            f"`offbeat keys rotate {keys} tls`"
        ) from None
    except OSError as error:
        raise unreadable(certificate, error) from None
    return context


CertificateStamp = tuple[tuple[int, int], ...]


def certificate_stamp(keys: Path) -> CertificateStamp:
    """Return a value that changes whenever the certificate or its private key changes."""
    found = []
    for path in (keys / CERTIFICATE_FILE, keys / PRIVATE_FILE):
        try:
            seen = path.stat()
            found.append((seen.st_mtime_ns, seen.st_ino))
        except OSError:
            found.append((0, 0))
    return tuple(found)


def client_context(keys: Path) -> ssl.SSLContext:
    """Return the TLS context of a client, which accepts the certificate of this run and no other.

    Raises:
        KeysUnusable: there is no certificate, or others can change it.
    """
    certificate = keys / CERTIFICATE_FILE
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Only this very certificate is trusted, so the host name proves nothing more.
    context.check_hostname = False
    try:
        refuse_changeable(certificate, certificate.stat().st_mode)
        context.load_verify_locations(certificate)
    except ssl.SSLError as error:
        raise KeysUnusable(
            f"{certificate}: is no certificate ({error.reason}); copy that of the run"
        ) from None
    except OSError as error:
        raise unreadable(certificate, error) from None
    return context


@dataclass(frozen=True)
class Access:
    """Headers and TLS context with which a client asks the servers of a run."""

    headers: Mapping[str, str] = field(default_factory=dict)
    context: ssl.SSLContext | None = None
    """TLS context; None: not encrypted, and then there is no token either."""


def access(keys: Path | None) -> Access:
    """Read the access of a keys folder; None: a run that encrypts nothing.

    Raises:
        KeysUnusable: the folder lacks the token or the certificate.

    Example:
        >>> access(None)
        Access(headers={}, context=None)
    """
    return Access() if keys is None else Access(authorization_header(keys), client_context(keys))


def scheme(keys: Path | None) -> str:
    """Return the URL scheme of servers that have these keys.

    Example:
        >>> scheme(None), scheme(Path("keys"))
        ('http', 'https')
    """
    return "http" if keys is None else "https"


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


BACKLOG = 1024
"""Connections that may wait to be taken. Some hundreds of agents connect at the same time."""


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
            server = await asyncio.get_running_loop().create_server(
                runner.server, host, port, backlog=BACKLOG, **tls
            )
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
