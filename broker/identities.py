"""Identities of peers: which connection speaks for which peer, and whether its key permits that. Pure."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from broker.errors import NameInUse, WrongKey
from protocol.messages.any_message import AnyMessage
from protocol.messages.peers import Hello
from protocol.security.connections import Connection
from protocol.security.handshakes import Admission
from protocol.security.keys import Principal

MAX_IDENTITIES = 8_192
UNNAMED = "?"
"""Prefix of the name of a connection that has not said Hello yet. No peer's name may begin with it."""
REVOKED = "this key is not in the broker's keys folder any more; bring the keys of this role from there anew"


@dataclass(frozen=True)
class _Identity:
    peer: str
    who: Principal
    connection: Connection | None


def unnamed(route: bytes) -> str:
    """Return a name for a connection that has none; `Identities.route` maps it back."""
    return UNNAMED + route.hex()


class Identities:
    """Peers by connection and connections by peer, in a broker that checks keys.

    A connection gets its name by `bind`, once the broker accepts its Hello. A newer connection takes the name
    over if its key permits that name, once the older connection is closed or silent. From then on the older
    connection is a stranger, until it says Hello again. Learners need not wait, because their epochs say
    which one is newer.

    Args:
        admission: its allow-list says which key permits which name.
        heard: returns whether the broker has heard a peer of this name lately.
    """

    def __init__(self, admission: Admission, heard: Callable[[str], bool] = lambda peer: False) -> None:
        self._admission, self._heard = admission, heard
        self._by_route: OrderedDict[bytes, _Identity] = OrderedDict()
        self._routes: dict[str, bytes] = {}

    def name(self, route: bytes) -> str:
        """Return the name of the peer at the end of this connection."""
        caller = self._by_route.get(route)
        return caller.peer if caller is not None else unnamed(route)

    def route(self, peer: str) -> bytes | None:
        """Return the connection of a peer, by a name that `name` or `check` returned; None if it has none."""
        return bytes.fromhex(peer[len(UNNAMED) :]) if peer.startswith(UNNAMED) else self._routes.get(peer)

    def address(self, peer: str) -> str | None:
        """Return a name for the connection that a peer has now. It stays when the peer's name moves on."""
        route = self.route(peer)
        return unnamed(route) if route is not None else None

    def check(self, route: bytes, who: Principal | None, message: AnyMessage) -> str:
        """Return the name of the peer that sends this message; of a Hello the name that it asks for.

        Raises:
            WrongKey: the key does not permit this message.
            NameInUse: the name belongs to another process now.
        """
        if who is None:
            raise WrongKey(REVOKED)
        caller = self._by_route.get(route)
        if caller is not None and caller.who is not who and caller.who != who:
            raise WrongKey("this connection belongs to another key")
        if not isinstance(message, Hello):
            return caller.peer if caller is not None else self.name(route)
        if message.role != who.role:
            raise WrongKey(
                f"Hello of a {message.role} with the key {who.name}; each role has a key of its own"
            )
        if message.public_key not in ("", who.public):
            raise WrongKey(
                f"Hello with the public key {message.public_key[:8]}..., over a connection with {who.public[:8]}...; "
                "start the process again if its keys were replaced just now"
            )
        if message.peer.startswith(UNNAMED):
            raise WrongKey(f"a peer's name must not begin with {UNNAMED!r}")
        if why := self._admission.allowed.objection(who, message.peer):
            raise WrongKey(why)
        holder = self._by_route.get(self._routes.get(message.peer, b""))
        if holder is not None and holder.who.role != who.role:
            raise WrongKey(f"the name {message.peer} belongs to the role {holder.who.role} now")
        if holder is not None and caller is None and who.role != "learner" and self._in_use(holder):
            raise NameInUse(
                f"a process called {message.peer} is connected; names must be unique in a run. If that one is dead, "
                "this one is let in when its connection has ended"
            )
        return caller.peer if caller is not None else message.peer

    def bind(self, route: bytes, who: Principal, peer: str, connection: Connection | None = None) -> None:
        """Give a connection the name of the peer whose Hello came by it and was accepted."""
        caller = self._by_route.get(route)
        if caller is None:
            self._bind(route, _Identity(peer, who, connection))
        else:
            # The peer may have connected anew.
            self._by_route[route] = replace(caller, connection=connection)
            self._by_route.move_to_end(route)

    def revoked(self) -> list[str]:
        """Return the names of the peers whose keys are not admitted any more."""
        return [one.peer for one in self._by_route.values() if self._admission.sender(one.who.public) is None]

    def _in_use(self, holder: _Identity) -> bool:
        return holder.connection is not None and holder.connection.is_open and self._heard(holder.peer)

    def _bind(self, route: bytes, caller: _Identity) -> None:
        before = self._routes.get(caller.peer)
        if before is not None:
            del self._by_route[before]
        self._by_route[route] = caller
        self._routes[caller.peer] = route
        # Remove the peer whose last Hello is the oldest. The broker asks it for a Hello when it sends again.
        if len(self._by_route) > MAX_IDENTITIES:
            _, forgotten = self._by_route.popitem(last=False)
            del self._routes[forgotten.peer]
