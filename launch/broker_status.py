"""What the broker answers at `/status`, now and then or once a second from a thread."""

import json
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import KeysUnusable
from protocol.http_auth import authorization_header

INTERVAL_S = 1.0
TIMEOUT_S = 1.5
UNAUTHORISED = 401
MAX_BYTES = 64 << 20


class NoAnswer(ConnectionError):
    """The broker did not tell its status; the text says what was tried and what came of it."""


def fetch(http: str, timeout_s: float = TIMEOUT_S, *, keys: Path | None = None) -> dict[str, Any]:
    """The status as the broker tells it at ``http`` (host:port, or a URL).

    Args:
        keys: folder with the token, of a run that asks for it.

    Raises:
        NoAnswer: it does not answer in time, or with something else.
    """
    url = f"{http if '://' in http else f'http://{http}'}/status"
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as a rule loopback: no proxy
    try:
        request = urllib.request.Request(url, headers=authorization_header(keys))
        with ask.open(request, timeout=timeout_s) as answer:
            status = json.loads(answer.read(MAX_BYTES))
    except urllib.error.HTTPError as error:
        cure = (
            ", it asks for the token: name the run folder, or --keys FOLDER"
            if error.code == UNAUTHORISED
            else ""
        )
        raise NoAnswer(f"{url}: {error}{cure}") from None
    except (KeysUnusable, OSError, ValueError) as error:
        raise NoAnswer(f"{url}: {error}") from None
    if not isinstance(status, dict) or "peers" not in status:
        raise NoAnswer(f"{url}: answers, but not as a broker does")
    return status


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
