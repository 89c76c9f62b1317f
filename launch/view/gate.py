"""Who may ask: host, origin, method, token and cookie of each request. Pure.

A browser sends cookies with every request to an address, whichever page asks. So a page of a stranger is kept out by
the header `Origin`, and one whose name was turned to this address (DNS rebinding) by the header `Host`.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from protocol.security.addresses import is_loopback

MAX_SESSIONS = 64
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer. Nothing is loaded from another host, and no script or style stands inside the page."""


@dataclass(frozen=True)
class Refusal:
    """Why a request is not answered."""

    status: int
    text: str


@dataclass
class Gate:
    """Checks requests, and knows who has logged in.

    Args:
        host: address that is served, without a port.
        port: port that is served.
        encrypted: whether it is served with TLS.
        admits: whether the value of an Authorization header may log in.
        new_secret: makes the values of cookies.

    Example:
        >>> gate = Gate("127.0.0.1", 6007, False, lambda value: value == "Bearer s", new_secret=lambda: "c")
        >>> own = {"Host": "127.0.0.1:6007"}
        >>> gate.refusal("GET", "/", own, ""), gate.refusal("GET", "/api/runs", own, "").status
        (None, 401)
        >>> gate.login("Bearer s"), gate.refusal("GET", "/api/runs", own, "c")
        ('c', None)
        >>> gate.refusal("GET", "/", {"Host": "evil.example"}, "c").status, gate.refusal("POST", "/", own, "c").status
        (421, 405)
    """

    host: str
    port: int
    encrypted: bool
    admits: Callable[[str], bool]
    new_secret: Callable[[], str] = field(default=lambda: secrets.token_urlsafe(32))
    _sessions: dict[bytes, None] = field(default_factory=dict)

    @property
    def cookie(self) -> str:
        """Name of the cookie. Cookies do not tell ports apart, so the name does."""
        return f"offbeat-view-{self.port}"

    @property
    def hosts(self) -> set[str]:
        """Values of the header `Host` that are served, in small letters. Browsers leave out the port of the scheme."""
        host = self.host.lower()
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        names = {host, *LOOPBACK_NAMES} if is_loopback(self.host) else {host}
        without = names if self.port == (443 if self.encrypted else 80) else set()
        return {f"{name}:{self.port}" for name in names} | without

    def login(self, authorization: str) -> str | None:
        """Return the value of a new cookie for whoever brings the secret, or None."""
        if not self.admits(authorization):
            return None
        value = self.new_secret()
        self._sessions[_digest(value)] = None
        while len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return value

    def refusal(self, method: str, path: str, headers: Mapping[str, str], cookie: str) -> Refusal | None:
        """Return why a request is refused, or None.

        Args:
            headers: of the request, by their usual names.
            cookie: value of the cookie `cookie`, or "".
        """
        if method not in ("GET", "HEAD"):
            return Refusal(405, "405: this server only answers GET\n")
        host = headers.get("Host", "")
        if host.lower() not in self.hosts:
            return Refusal(
                421, f"421: this server is {sorted(self.hosts)[0]}, and was asked for another host\n"
            )
        origin = headers.get("Origin")
        scheme = "https" if self.encrypted else "http"
        if origin is not None and origin.lower() != f"{scheme}://{host}".lower():
            return Refusal(403, "403: a page of another site asked\n")
        foreign = headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none")
        # A link on another page may open this one, but nothing of it may be part of another page.
        if foreign and headers.get("Sec-Fetch-Mode") != "navigate":
            return Refusal(403, "403: a page of another site asked\n")
        if path.startswith("/api/") and path != "/api/login" and not self._knows(cookie):
            return Refusal(401, "401: open the link that `offbeat view` printed when it started\n")
        return None

    def _knows(self, cookie: str) -> bool:
        given = _digest(cookie)
        # Compare with all, so that the time tells nothing.
        return any([hmac.compare_digest(given, known) for known in self._sessions]) and bool(cookie)


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "replace")).digest()
