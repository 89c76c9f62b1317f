"""What the broker answers at `/status`, now and then or once a second from a thread."""

import http.client as http_client
import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import NoAnswer
from protocol.errors import KeysUnusable
from protocol.security.http_tls import access, scheme

INTERVAL_S = 1.0
TIMEOUT_S = 1.5
UNAUTHORISED = 401
MAX_BYTES = 64 << 20


def fetch(http: str, timeout_s: float = TIMEOUT_S, *, keys: Path | None = None) -> dict[str, Any]:
    """The status as the broker tells it at ``http`` (host:port, or a URL).

    Args:
        keys: folder with the token and the certificate, of a run that asks for it.

    Raises:
        NoAnswer: it does not answer in time, or with something else.
    """
    url = f"{http if '://' in http else f'{scheme(keys)}://{http}'}/status"
    if keys is not None and not url.startswith("https://"):
        raise NoAnswer(f"{url}: the token is sent under https only; leave the scheme out, or the keys")
    try:
        given = access(keys)
        tls = [urllib.request.HTTPSHandler(context=given.context)] if given.context else []
        no_proxy = urllib.request.ProxyHandler({})  # it is loopback, as a rule
        ask = urllib.request.build_opener(no_proxy, *tls)
        request = urllib.request.Request(url)
        for name, value in given.headers.items():
            request.add_unredirected_header(name, value)  # the token is for this server and no other
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
    if not isinstance(status, dict) or "peers" not in status:
        raise NoAnswer(f"{url}: answers, but not as a broker does")
    return status


def _cure(error: Exception, keys: Path | None) -> str:
    """What may help where one side speaks TLS and the other does not."""
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
    """What one question came to; ``status`` is None if there was no answer."""

    at: float
    status: dict[str, Any] | None
    why: str = ""


class Poller:
    """Asks once a second, in a thread, so that a broker that hangs does not hold up who watches it."""

    def __init__(self, http: str, keys: Path | None = None) -> None:
        self._http, self._keys = http, keys
        self._answer: Answer | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="broker status", daemon=True)
        self._thread.start()

    def take(self) -> Answer | None:
        """The newest answer, once."""
        answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        """Ask no more."""
        self._stop.set()
        self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        while True:
            due = time.monotonic() + INTERVAL_S
            try:
                status = fetch(self._http, keys=self._keys)
                self._answer = Answer(time.monotonic(), status)
            except NoAnswer as error:
                self._answer = Answer(time.monotonic(), None, str(error))
            if self._stop.wait(max(0.0, due - time.monotonic())):
                return
