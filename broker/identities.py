"""Which connection speaks for which peer, and whether its key may. Pure."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from broker.errors import NameInUse, WrongKey
from protocol.messages import AnyMessage, Hello
from protocol.security.connections import Connection
from protocol.security.handshakes import Admission
from protocol.security.keys import Principal

MAX_CALLERS = 8_192
UNNAMED = "?"
"""Begins the name of a connection that has not said Hello yet; no peer may be called so."""
REVOKED = "this key is not in the broker's keys folder any more; bring the keys of this role from there anew"


@dataclass(frozen=True)
class _Identity:
    peer: str
    who: Principal
    connection: Connection | None


def unnamed(route: bytes) -> str:
    """A name for a connection without one; `Identities.route` knows it again."""
    return UNNAMED + route.hex()


class Identities:
    """Peers by connection and back, in a broker that checks keys.

    A connection gets its name with its Hello. A newer connection under the same name, if its key is good for that
    name, takes it over once the one before is closed or has fallen silent; what that says from then on is
    that of a stranger, until it says Hello again. Learners need not wait: their epochs say who is the newer.

    Args:
        admission: whose allow-list says which key is good for which name.
        heard: whether a peer of this name has been heard lately.
    """

    def __init__(self, admission: Admission, heard: Callable[[str], bool] = lambda peer: False) -> None:
        self._admission, self._heard = admission, heard
        self._callers: OrderedDict[bytes, _Identity] = OrderedDict()
        self._routes: dict[str, bytes] = {}

    def name(self, route: bytes) -> str:
        """Name of the peer at the end of this connection."""
        caller = self._callers.get(route)
        return caller.peer if caller is not None else unnamed(route)

    def route(self, peer: str) -> bytes | None:
        """Connection of a peer, by the name that `name` or `check` gave it; None: it has none."""
        return bytes.fromhex(peer[len(UNNAMED) :]) if peer.startswith(UNNAMED) else self._routes.get(peer)

    def check(
        self,
        route: bytes,
        who: Principal | None,
        message: AnyMessage,
        connection: Callable[[], Connection | None] = lambda: None,
    ) -> str:
        """Name of the peer that sends this message.

        Args:
            connection: by which it came; asked for with a Hello only.

        Raises:
            WrongKey: its key is not good for that.
            NameInUse: its name belongs to another process just now.
        """
        if who is None:
            raise WrongKey(REVOKED)
        caller = self._callers.get(route)
        if caller is not None and caller.who is not who and caller.who != who:
            raise WrongKey("this connection belongs to another key")
        if not isinstance(message, Hello):
            return caller.peer if caller is not None else self.name(route)
        if message.role != who.role:
            raise WrongKey(
                f"Hello of a {message.role} with the key {who.name}; each role has a key of its own"
            )
        if message.peer.startswith(UNNAMED):
            raise WrongKey(f"a peer's name must not begin with {UNNAMED!r}")
        if why := self._admission.allowed.objection(who, message.peer):
            raise WrongKey(why)
        holder = self._callers.get(self._routes.get(message.peer, b""))
        if holder is not None and holder.who.role != who.role:
            raise WrongKey(f"the name {message.peer} belongs to the role {holder.who.role} now")
        if holder is not None and caller is None and who.role != "learner" and self._in_use(holder):
            raise NameInUse(
                f"a process called {message.peer} is connected; names must be unique in a run. If that one is dead, "
                "this one is let in when its connection has ended"
            )
        if caller is None:
            self._bind(route, _Identity(message.peer, who, connection()))
        else:
            self._callers[route] = replace(caller, connection=connection())  # it may have connected anew
            self._callers.move_to_end(route)
        return self.name(route)

    def _in_use(self, holder: _Identity) -> bool:
        return holder.connection is not None and holder.connection.is_open and self._heard(holder.peer)

    def _bind(self, route: bytes, caller: _Identity) -> None:
        before = self._routes.get(caller.peer)
        if before is not None:
            del self._callers[before]
        self._callers[route] = caller
        self._routes[caller.peer] = route
        if (
            len(self._callers) > MAX_CALLERS
        ):  # the one that has not said Hello for longest; it will be asked to
            _, forgotten = self._callers.popitem(last=False)
            del self._routes[forgotten.peer]
