"""One environment server, as a client sees it: requests with a deadline, repeated while nobody answers."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from envs.errors import EnvError, ServerLost
from envs.remote.failures import FULL, error_of
from envs.remote.wire import BODY_BYTES, decoded, encoded
from protocol.security.http import Access

RETRY_S = 0.25
"""Time between two attempts to reach a server."""
PIECE_BYTES = 2**16


class EnvironmentClient:
    """Asks one server. All methods are for one event loop.

    Args:
        url: address of the server, without a slash at the end.
        access: token and certificate.
    """

    def __init__(self, url: str, access: Access) -> None:
        self.url, self._access = url, access
        self.episodes = 0
        """Episodes of this process on the server."""
        self.failed_at = float("-inf")
        """Monotonic time at which the server last did not answer."""
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self, method: str, path: str, content: Mapping[str, Any] | None, until: float, *, patient: bool = True
    ) -> dict[str, Any]:
        """Return the content of the server's answer.

        Every request may be repeated, so one without an answer is, until the deadline.

        Args:
            until: monotonic time of the deadline.
            patient: False: do not repeat a request that could not be sent, or that has no answer.

        Raises:
            ServerLost: the server does not answer, or does not have the episode.
            ServiceFailed: nobody is at fault, or the server refuses the request.
            RemoteFailed: the environment failed.
        """
        while True:
            try:
                status, body = await self._once(method, path, content, until)
                if status != FULL:
                    break
                why = str((_content(body).get("error") or {}).get("message"))
            except TimeoutError:
                self.failed_at = time.monotonic()
                raise ServerLost(f"the environment server {self.url} took too long to answer") from None
            except (aiohttp.ClientError, OSError) as error:
                why = str(error) or type(error).__name__
            self.failed_at = time.monotonic()
            if not patient or time.monotonic() + RETRY_S >= until:
                raise ServerLost(f"the environment server {self.url} does not answer: {why}")
            await asyncio.sleep(RETRY_S)
        if status == 200:
            return decoded(body)
        refused = error_of(status, _content(body), self.url)
        if isinstance(refused, ServerLost):
            self.failed_at = time.monotonic()
        raise refused

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
            # Transports close in the next step of the loop, which may be the last one of this thread.
            await asyncio.sleep(0)

    async def _once(
        self, method: str, path: str, content: Mapping[str, Any] | None, until: float
    ) -> tuple[int, bytes]:
        if self._session is None:
            # Each episode may have a request under way.
            connector = aiohttp.TCPConnector(limit=0, ssl=self._access.context or True)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=dict(self._access.headers), timeout=aiohttp.ClientTimeout()
            )
        async with asyncio.timeout(max(0.0, until - time.monotonic())):
            data = None if content is None else encoded(content)
            async with self._session.request(
                method, self.url + path, data=data, allow_redirects=False
            ) as answer:
                return answer.status, await _whole(answer)


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer.

    Raises:
        EnvError: it is larger than any that a server sends.
    """
    pieces = bytearray()
    async for piece in answer.content.iter_chunked(PIECE_BYTES):
        pieces += piece
        if len(pieces) > BODY_BYTES:
            raise EnvError(f"an answer of {answer.url.origin()} has more than {BODY_BYTES} bytes")
    return bytes(pieces)


def _content(body: bytes) -> dict[str, Any]:
    """Return the content of an error's body, which may be that of a server between."""
    try:
        return decoded(body)
    except EnvError:
        return {}
