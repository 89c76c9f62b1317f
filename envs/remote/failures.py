"""Errors of a server's environments as answers, and back. Pure.

An error of the environment fails the episode, as it would in the actor's own process. Everything else, such as a
server that is gone, is nobody's fault: the task runs again.
"""

import traceback
from collections.abc import Mapping
from typing import Any

from envs.blame import place_of_error
from envs.errors import RemoteFailed, ServerLost, ServiceFailed

FAILED = 422
"""Status of an error of the environment."""
SERVICE = 503
"""Status of an error that is nobody's fault."""
FULL = 429
"""Status for a further episode on a server that has no room for it."""
UNKNOWN = 404
"""Status for an episode that the server does not have."""
TAIL_LINES = 6
"""Lines of a traceback that an answer has."""
TEXT = 1_000
"""Characters of an error's text that an answer has."""


def failure_body(error: BaseException, *, blameless: bool) -> dict[str, Any]:
    """Return the body for an error.

    Args:
        blameless: the environment is not at fault.

    Example:
        >>> failure_body(KeyError("answer"), blameless=False)["error"]["kind"]
        'KeyError'
    """
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    found = {
        "blameless": blameless,
        "kind": type(error).__name__,
        "message": " ".join(str(error).split())[:TEXT],
        "place": place_of_error(error) if error.__traceback__ is not None else "",
        # The last line is the error itself.
        "lines": [line.strip()[:TEXT] for line in lines[-TAIL_LINES - 1 : -1]],
    }
    return {"error": found}


def error_of(status: int, body: Mapping[str, Any], url: str) -> ServiceFailed | RemoteFailed:
    """Return the error that an answer means.

    Args:
        status: status of the answer, not 200.
        url: address of the server, for the text.

    Example:
        >>> body = failure_body(KeyError("answer"), blameless=False)
        >>> str(error_of(FAILED, body, "http://127.0.0.1:80"))
        "KeyError: 'answer', on http://127.0.0.1:80"
        >>> type(error_of(404, {}, "http://127.0.0.1:80")).__name__
        'ServerLost'
    """
    found = body.get("error")
    found = found if isinstance(found, Mapping) else {}
    kind, message, place = (str(found.get(key, "")) for key in ("kind", "message", "place"))
    if status == FAILED and kind:
        where = f" in {place}" if place else ""
        lines = " / ".join(str(line) for line in found.get("lines") or ())
        return RemoteFailed(
            f"{kind}: {message}{where}, on {url}" + (f"; last lines: {lines}" if lines else "")
        )
    if status == SERVICE and kind:
        return ServiceFailed(f"on {url}: {kind}: {message}")
    cure = "; is it the token of the server's keys folder?" if status == 401 else ""
    why = f": {message}" if message else ""
    # A server that refuses a request would refuse it again. One that has lost an episode can play another.
    kind_of_error = ServerLost if status == UNKNOWN or status >= 500 else ServiceFailed
    return kind_of_error(f"the environment server {url} answered with status {status}{why}{cure}")
