"""The broker's answer at `/status`, and the weights server's at `/`: fetched once, or once a second by a thread."""

import http.client as http_client
import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import NoAnswer
from protocol.errors import KeysUnusable
from protocol.security.http import access, scheme

INTERVAL_S = 1.0
TIMEOUT_S = 1.5
UNAUTHORISED = 401
MAX_BYTES = 64 << 20


def fetch(http: str, timeout_s: float = TIMEOUT_S, *, keys: Path | None = None) -> dict[str, Any]:
    """Return the status that the broker serves at ``http`` (host:port, or a URL).

    Args:
        keys: folder with the token and the certificate, for a broker that asks for the token.

    Raises:
        NoAnswer: the broker does not answer in time, or the answer is not a status.
    """
    status = _fetch(f"{_base(http, keys)}/status", timeout_s, keys)
    if "peers" not in status:
        raise NoAnswer(f"{_base(http, keys)}/status: answers, but not as a broker does")
    return status


def fetch_weights_server(
    http: str, timeout_s: float = TIMEOUT_S, *, keys: Path | None = None
) -> dict[str, Any]:
    """Return the weights server's page about itself.

    Raises:
        NoAnswer: the server does not answer in time, or the answer is not such a page.
    """
    page = _fetch(f"{_base(http, keys)}/", timeout_s, keys)
    if "held" not in page:
        raise NoAnswer(f"{_base(http, keys)}/: answers, but not as a weights server does")
    return page


def _base(http: str, keys: Path | None) -> str:
    return http if "://" in http else f"{scheme(keys)}://{http}"


def _fetch(url: str, timeout_s: float, keys: Path | None) -> dict[str, Any]:
    """Return the JSON object at a URL.

    Raises:
        NoAnswer: there is no answer in time, or it is no JSON object.
    """
    if keys is not None and not url.startswith("https://"):
        raise NoAnswer(f"{url}: the token is sent under https only; leave the scheme out, or the keys")
    try:
        given = access(keys)
        tls = [urllib.request.HTTPSHandler(context=given.context)] if given.context else []
        # The broker is usually on loopback, which a proxy of the environment would not reach.
        no_proxy = urllib.request.ProxyHandler({})
        ask = urllib.request.build_opener(no_proxy, *tls)
        request = urllib.request.Request(url)
        for name, value in given.headers.items():
            # The token is for this server only, so a redirect must not carry it to a different one.
            request.add_unredirected_header(name, value)
        with ask.open(request, timeout=timeout_s) as answer:
            status = json.loads(answer.read(MAX_BYTES))
    except urllib.error.HTTPError as error:
        cure = (
            ", it asks for the token: name the run folder, or --keys FOLDER"
            if error.code == UNAUTHORISED
            else ""
        )
        raise NoAnswer(f"{url}: {error}{cure}") from None
    except (KeysUnusable, OSError, ValueError, http_client.HTTPException) as error:
        raise NoAnswer(f"{url}: {error}{_cure(error, keys)}") from None
    if not isinstance(status, dict):
        raise NoAnswer(f"{url}: answers, but not with a JSON object")
    return status


def _cure(error: Exception, keys: Path | None) -> str:
    """Return what may help if only one side speaks TLS, or if the certificate is a different one, or ""."""
    reason = getattr(error, "reason", error)
    if keys is None and isinstance(reason, http_client.HTTPException | ConnectionResetError):
        return ", is it encrypted? Then name the run folder, or --keys FOLDER"
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f", another run's certificate than the one in {keys}"
    if isinstance(reason, ssl.SSLError):
        return (
            ", does it speak no TLS? Then leave the keys out (security.http_token is beyond_loopback there)"
        )
    return ""


@dataclass(frozen=True)
class Answer:
    """Result of one request, at a monotonic time; ``status`` is None if there was no answer."""

    at: float
    status: dict[str, Any] | None
    why: str = ""


class Poller:
    """Asks once a second in a thread, so that a server that hangs does not block the supervisor.

    Args:
        http: address of the server.
        keys: folder with the token and the certificate, if the server asks for them.
        ask: `fetch`, or `fetch_weights_server`.
    """

    def __init__(
        self, http: str, keys: Path | None = None, ask: Callable[..., dict[str, Any]] = fetch
    ) -> None:
        self._http, self._keys, self._ask = http, keys, ask
        self._answer: Answer | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"asks {http}", daemon=True)
        self._thread.start()

    def take(self) -> Answer | None:
        """Return the newest answer, or None if there is no new one since the last call."""
        # Invariant: only the thread stores answers. One stored between these two accesses is lost, which is
        # harmless because the next one follows soon.
        answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        """Stop asking and wait for the thread."""
        self._stop.set()
        self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        while True:
            due = time.monotonic() + INTERVAL_S
            try:
                status = self._ask(self._http, keys=self._keys)
                self._answer = Answer(time.monotonic(), status)
            except NoAnswer as error:
                self._answer = Answer(time.monotonic(), None, str(error))
            if self._stop.wait(max(0.0, due - time.monotonic())):
                return
