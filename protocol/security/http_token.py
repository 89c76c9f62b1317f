"""The bearer token of a run's HTTP servers: a client with the keys folder is served, others get status 401.

The file holds one token per line. Clients send the first. Servers accept any of them, so that a token can be
replaced while the old one is still in use, and read the file again when it changes.
"""

import hmac
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import KeysUnusable
from protocol.security.key_checks import refuse_open_secret, unreadable

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
            self._look(keys)

    def admits(self, authorization: str) -> bool:
        """Return whether the header has a valid token. The comparison takes constant time for all tokens."""
        if self._keys is None:
            return True
        try:
            self._look(self._keys)
        except (OSError, KeysUnusable) as error:
            # The file is being replaced, or is gone: the tokens known so far stay valid.
            log.warning("the token stays as it was: %s", error)
        scheme, _, said = authorization.partition(" ")
        given = said.strip().encode("utf-8", "replace")
        # Always compare with all tokens, so that the time tells nothing.
        good = [hmac.compare_digest(given, token) for token in self._tokens]
        return scheme.lower() == "bearer" and any(good)

    def _look(self, keys: Path) -> None:
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
