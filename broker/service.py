"""The broker process: its socket for peers, the messages that come over it, and HTTP.

It decodes frames, hands messages to the `Dispatcher` and sends its actions. `PeerSocket` knows which connection speaks
for which peer.
"""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import zmq
from aiohttp import web

from broker.config import BrokerConfig
from broker.core.fleet import FOR_EVER, Limits
from broker.core.peers import Send
from broker.core.records import Ledger
from broker.errors import BindRefused, BrokerError, JournalError, NameInUse, StateBroken, WrongKey
from broker.metrics import prometheus
from broker.output_commit import OutputCommit
from broker.status import status
from protocol.codec import AnyMessage, Buffer, decode, encode, encode_delivery, open_envelope
from protocol.direct import DirectListener, is_direct
from protocol.errors import LimitExceeded, LinkDown, ProtocolError
from protocol.messages.episodes import Deliver
from protocol.messages.fields import MAX_ITEMS
from protocol.messages.peers import Goodbye, Hello, Refused
from protocol.security.addresses import check_endpoint, split_address
from protocol.security.client import REVOKED
from protocol.security.guard import Admission, Connection, Guard, GuardedSocket
from protocol.security.http import require_token, scheme, serving
from protocol.security.keys import AllowList, Principal
from protocol.sockets import AsyncSocket, router
from protocol.wanted import FILE, WantedFile

log = logging.getLogger(__name__)


class Encoder:
    """Encodes actions. A message that leaves for many peers in a row is encoded once."""

    def __init__(self) -> None:
        self._last: AnyMessage | None = None
        self._frames: Sequence[Buffer] = ()

    def frames(self, action: Send) -> Sequence[Buffer]:
        """Return the frames of an action.

        Raises:
            LimitExceeded: the message is too large.
        """
        if isinstance(action.message, Deliver):
            return encode_delivery(action.message, action.frames)
        if action.message is not self._last:
            self._frames, self._last = encode(action.message), action.message
        return self._frames


PROC = Path("/proc")
LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""


def allow_many_connections() -> None:
    """Raise the limit of open files as far as allowed, because each connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        # The kernel may have a lower limit of its own, which it enforces with an error.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind_failure(field: str, address: str, number: int | None) -> str:
    """Return one line on why an address cannot be listened on: field, value, holder of the port and cure.

    Args:
        field: setting of the run file that holds the address.
        number: `errno` of the error that listening raised.

    Example:
        >>> bind_failure("broker.http", "10.9.9.9:5756", errno.EADDRNOTAVAIL)
        'broker.http is 10.9.9.9:5756, but this host has no such address; give one of its own, as a number'
    """
    port = address.rpartition(":")[2]
    if number == errno.EADDRINUSE:
        return (
            f"{field} is {address}, but the port is in use{holder(int(port)) if port.isdecimal() else ''}; choose "
            "another one, or port 0 to take a free one"
        )
    if number in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"{field} is {address}, but this host has no such address; give one of its own, as a number"
    return (
        f"{field} is {address}, which cannot be listened on: {os.strerror(number or 0)}; choose another one"
    )


def holder(port: int) -> str:
    """Return " by process PID (NAME)" for the process that listens on a TCP port, or "" if it is not visible."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for process in PROC.iterdir() if sockets else ():
        # Other users' processes cannot be looked into, and a process may end meanwhile.
        with contextlib.suppress(OSError):
            if process.name.isdecimal() and any(
                os.readlink(fd) in sockets for fd in (process / "fd").iterdir()
            ):
                return f" by process {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def _listening(port: int) -> list[str]:
    """Return the inodes of the sockets that listen on a port."""
    inodes = []
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.append(fields[9])
    return inodes


MAX_IDENTITIES = 8_192
UNNAMED = "?"
"""Prefix of the name of a connection that has not said Hello yet. No peer's name may begin with it."""


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
        if message.role not in who.roles:
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
        if holder is not None and not {*holder.who.roles} & {*who.roles}:
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


MAX_WARNINGS = 100


def may_log(ledger: Ledger, code: str) -> bool:
    """Return whether a refusal with this code is still logged. The limit keeps the log small."""
    return ledger.refused.get(code, 0) < MAX_WARNINGS


class Received(Protocol):
    """Handles one message, whose first frame is the routing id. ``sender`` is the owner of its key."""

    def __call__(self, frames: list[Buffer], sender: Principal | None = None) -> None: ...


class PeerSocket:
    """A ROUTER socket, with the identities of its peers if it is encrypted. `bind` opens it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.guard: Guard | None = None
        """Keys that may connect; None without encryption."""
        self.identities: Identities | None = None
        """Names of the connections that speak for peers; None without encryption, where the routing id is the name."""
        self.socket: AsyncSocket | DirectListener | None = None

    def bind(
        self,
        endpoint: str,
        keys: Path | None,
        *,
        heard: Callable[[str], bool],
        received: Received,
        after_batch: Callable[[], None],
    ) -> None:
        """Listen at ``endpoint``, encrypted if there are ``keys``.

        Args:
            heard: returns whether the broker has heard a peer of this name lately.
            received: called with each message.
            after_batch: called after the messages that were there at one time.

        Raises:
            BindRefused: the address is taken, or does not belong to this host.
        """
        if is_direct(endpoint):
            self.socket = DirectListener(endpoint, received)
            return
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        if keys is not None:
            self.guard = Guard(context, keys, "broker")
            self.identities = Identities(self.guard.admission, heard)
        socket = router(context) if self.guard is None else self.guard.router(context)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise BindRefused(bind_failure("broker.endpoint", endpoint, error.errno)) from None
        if self.guard is None:
            self.socket = AsyncSocket(socket, received)
        else:
            self.socket = GuardedSocket(socket, received, self.guard)
        self.socket.after_batch = after_batch
        log.info("peers connect to %s", socket.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def pumping(self) -> bool:
        """Whether the socket hands over a batch of messages now, and calls ``after_batch`` behind them."""
        return self.socket is not None and self.socket.pumping

    def connection(self) -> Connection | None:
        """Return the connection of the message that is handled now; None without encryption."""
        return self.socket.connection() if isinstance(self.socket, GuardedSocket) else None

    def name(self, route: bytes) -> str:
        """Return the name of the peer at the end of a connection."""
        return (
            route.decode("utf-8", "surrogateescape")
            if self.identities is None
            else self.identities.name(route)
        )

    def _route(self, name: str) -> bytes | None:
        return (
            name.encode("utf-8", "surrogateescape")
            if self.identities is None
            else self.identities.route(name)
        )

    def send(self, actions: Sequence[Send]) -> None:
        """Send these messages. One that cannot be sent is logged and counted."""
        encoder = Encoder()
        for action in actions:
            route = self._route(action.peer)
            # No connection of this peer is known, for example since a restart of the broker. ZeroMQ would
            # drop the message, too.
            if route is None:
                continue
            assert self.socket is not None
            try:
                self.socket.send([route, *encoder.frames(action)])
            except (LimitExceeded, LinkDown) as error:
                if may_log(self._ledger, "not_sent"):
                    log.error("%s to %s not sent: %s", type(action.message).__name__, action.peer, error)
                self._ledger.refuse("not_sent")

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        if self.guard is not None:
            self.guard.close()


class HttpPages:
    """The broker's HTTP pages. With keys for HTTP, a client must send the token.

    Args:
        guard: who may connect to the broker's socket; None without encryption.
    """

    def __init__(self, output_commit: OutputCommit, guard: Guard | None, http_keys: Path | None) -> None:
        self._output_commit, self._dispatcher = output_commit, output_commit.dispatcher
        self._guard, self._http_keys = guard, http_keys

    def app(self) -> web.Application:
        """Return the application to serve."""
        app = web.Application(client_max_size=1024, middlewares=[require_token(self._http_keys)])
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _status(self, _: web.Request) -> web.Response:
        page = status(
            self._dispatcher,
            time.monotonic(),
            journal=self._output_commit.status(),
            security=self._security(),
        )
        return web.json_response(page)

    def _security(self) -> dict[str, Any]:
        if self._guard is None:
            return {"encrypted": False}
        admission = self._guard.admission
        admission.reload(time.monotonic())
        return {
            "encrypted": True,
            "keys_admitted": len(admission.allowed),
            "handshakes_refused": dict(admission.refused),
        }

    async def _metrics(self, _: web.Request) -> web.Response:
        text = prometheus(self._dispatcher, time.monotonic())
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


TICK_S = 0.05
LOOK_S = 1.0
"""Time between two looks at the file of what a user wants."""
ASKED = "asked by `offbeat drain` or `offbeat scale`"
HTTP_STOP_S = 1.0
COMING_AND_GOING = (Hello, Goodbye)


def serve(
    config: BrokerConfig,
    *,
    run: str,
    max_policy_lag: int,
    journal: Path | None = None,
    accept_loss: bool = False,
    keys: Path | None = None,
    http_keys: Path | None = None,
    limits: Limits = FOR_EVER,
    digest: str = "",
) -> bool:
    """Serve until SIGTERM, or until a learner says that the run is over; then drain. Return whether the run is over.

    Args:
        journal: folder of the journal, from which the state is recovered. None: there is no journal, and the
            state is lost with the process.
        accept_loss: start although the journal is damaged.
        keys: folder of the keys. None: nothing is encrypted, and the broker listens to this machine only.
        http_keys: folder of the keys for HTTP with TLS and a token. None: HTTP is open to this machine.
        limits: how long it waits for peers.
        digest: digest of the run, see `protocol.digest`; "": peers of any digest are admitted.

    Raises:
        AddressRefused: other hosts can reach an address, and there are no keys.
        BindRefused: an address is taken, or does not belong to this host.
        JournalError: the journal belongs to another run, is in use, or is damaged.
        BrokerError: the journal failed while the broker ran; a restart may help.
        StateBroken: a fault of the broker; after a restart it goes on from the journal.
        KeysUnusable: the folder lacks the broker's keys, or the certificate.
    """
    check_endpoint("broker.endpoint", config.endpoint, keys)
    host, port = split_address("broker.http", config.http, http_keys)
    allow_many_connections()
    try:
        output_commit = OutputCommit.open(config, run, max_policy_lag, journal, accept_loss, limits)
        output_commit.dispatcher.digest = digest
        wanted = WantedFile(journal.parent / FILE) if journal is not None else None
        asyncio.run(Service(config, output_commit, keys, http_keys, wanted).run(host, port))
        return output_commit.dispatcher.over
    finally:
        # The linger lets the last answers leave.
        zmq.Context.instance().destroy(linger=1_000)


class Service:
    """Sockets and clock around an `OutputCommit`.

    Args:
        wanted: file in which a user writes who is to leave; None: there is no run folder.
    """

    def __init__(
        self,
        config: BrokerConfig,
        output_commit: OutputCommit,
        keys: Path | None,
        http_keys: Path | None,
        wanted: WantedFile | None = None,
    ) -> None:
        self._config, self._output_commit, self._dispatcher = config, output_commit, output_commit.dispatcher
        self._keys, self._http_keys = keys, http_keys
        self._peers = PeerSocket(self._dispatcher.state.ledger)
        self._admitted: AllowList | None = None
        """Allow-list of which the dispatcher knows."""
        self._wanted, self._asked_at, self._looked = wanted, time.time(), -LOOK_S
        self._stop = asyncio.Event()
        self._flushing = self._ended = False
        self._broken: BrokerError | None = None

    async def run(self, host: str, port: int) -> None:
        """Bind, serve until SIGTERM, SIGINT or the end of the run, then drain."""
        loop = asyncio.get_running_loop()
        self._output_commit.bell.heard = partial(loop.call_soon_threadsafe, self._release)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        self._bind()
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._bind_http(stack, host, port)
                while not self._stop.is_set() and not self._dispatcher.over:
                    self._look_at_keys(time.monotonic())
                    self._look_at_wanted(time.monotonic())
                    self._act(self._output_commit.tick(time.monotonic()))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stop.wait(), TICK_S)
                if self._broken is not None:
                    raise self._broken
                await self._drain()
        finally:
            self._ended = True
            self._output_commit.bell.heard = lambda: None
            self._peers.close()
            self._output_commit.close()

    def stop(self) -> None:
        """Drain, then return from `run`."""
        self._stop.set()

    def _bind(self) -> None:
        connected = self._dispatcher.state.peers
        self._peers.bind(
            self._config.endpoint,
            self._keys,
            heard=lambda peer: connected.get(peer) is not None,
            received=self._received,
            after_batch=self._after_batch,
        )
        if self._peers.identities is not None:
            self._output_commit.address = self._peers.identities.address

    async def _bind_http(self, stack: contextlib.AsyncExitStack, host: str, port: int) -> None:
        app = HttpPages(self._output_commit, self._peers.guard, self._http_keys).app()
        http = serving(app, host, port, self._http_keys, shutdown_s=HTTP_STOP_S)
        try:
            bound = await stack.enter_async_context(http)
        except OSError as error:
            raise BindRefused(bind_failure("broker.http", self._config.http, error.errno)) from None
        log.info("%s://%s:%d/status", scheme(self._http_keys), host, bound)

    async def _drain(self) -> None:
        reason = "the run is over" if self._dispatcher.over else "the broker is ending"
        log.info("draining: %s, %d peers are connected", reason, len(self._dispatcher.state.peers))
        self._act(self._output_commit.drain(reason, time.monotonic()))
        while not self._dispatcher.drained(time.monotonic()):
            self._act(self._output_commit.tick(time.monotonic()))
            await asyncio.sleep(TICK_S)
        log.info("ended, peers left: %s", [peer.name for peer in self._dispatcher.state.peers])

    def _look_at_keys(self, now: float) -> None:
        """Tell the dispatcher if the keys that are admitted have changed."""
        guard, identities = self._peers.guard, self._peers.identities
        if guard is None or identities is None:
            return
        admission = guard.admission
        admission.reload(now)
        if admission.allowed is self._admitted:
            return
        self._admitted, keys = admission.allowed, admission.allowed.keys_of("actor")
        if len(keys) > MAX_ITEMS:
            log.error("%d keys of actors, generators admit %d of them; remove some", len(keys), MAX_ITEMS)
        self._act(self._output_commit.admit(keys[:MAX_ITEMS], identities.revoked(), now))

    def _look_at_wanted(self, now: float) -> None:
        """Ask those to leave whom the user has named since the last look. Wishes from before the start are old."""
        if self._wanted is None or now - self._looked < LOOK_S:
            return
        self._looked = now
        wanted = self._wanted.changed()
        if wanted is not None:
            self._dispatcher.wanted = wanted
        new = [one for one in wanted.leaving if one.at > self._asked_at] if wanted is not None else []
        for one in new:
            log.info("%s is asked to leave", one.name)
            self._act(self._output_commit.ask_to_leave(one.name, ASKED, now))
        self._asked_at = max([self._asked_at, *(one.at for one in new)])

    # --- messages -----------------------------------------------------------------------------------------

    def _received(self, frames: list[Buffer], sender: Principal | None = None) -> None:
        """Handle one multipart message, whose first frame is the routing id of its sender.

        ``sender`` is the owner of the key that the message came with. In a broker with keys, None means that
        the key is not admitted (any more).
        """
        route, raw = bytes(frames[0]), frames[1:]
        if self._peers.identities is not None and sender is None:
            self._refuse_key(route, "message", REVOKED)
            return
        try:
            messages = open_envelope(raw)
        except ProtocolError as error:
            self._malformed(self._peers.name(route), raw, error)
            return
        for one in messages:
            try:
                self._take(route, one, sender)
            except Exception:
                # The other messages of the envelope count all the same.
                log.exception("a message from %r could not be handled", self._peers.name(route))

    def _take(self, route: bytes, frames: Sequence[Buffer], sender: Principal | None) -> None:
        name = self._peers.name(route)
        try:
            message, _ = decode(frames)
        except ProtocolError as error:
            self._malformed(name, frames, error)
            return
        if self._peers.identities is not None:
            try:
                name = self._peers.identities.check(route, sender, message)
            except WrongKey as error:
                self._refuse_key(route, type(message).__name__, str(error))
                return
            except NameInUse as error:
                self._act(self._output_commit.refuse(name, "name_in_use", str(error)))
                return
        if isinstance(message, COMING_AND_GOING):
            log.info("%s from %r", type(message).__name__, name)
        if self._peers.identities is not None and isinstance(message, Hello):
            assert sender is not None
            refusal = self._output_commit.objection(name, message, frames[1:])
            if refusal is not None:
                self._refuse(route, refusal)
                return
            self._peers.identities.bind(route, sender, name, self._peers.connection())
            # Generators must know a new key before its actor connects to them.
            self._look_at_keys(time.monotonic())
        try:
            self._act(self._output_commit.handle(name, message, frames[1:], time.monotonic()))
        except BrokerError as error:
            # The state is broken, or its journal cannot be opened again.
            log.critical("%s from %r", type(message).__name__, name, exc_info=True)
            self._broken = error if isinstance(error, StateBroken) else BrokerError(str(error))
            self._stop.set()

    def _malformed(self, name: str, frames: Sequence[Buffer], error: ProtocolError) -> None:
        if may_log(self._dispatcher.state.ledger, error.code):
            log.warning("message from %r refused: %s", name, error)
        self._output_commit.dead_letters.keep(name, error.code, str(error), frames)
        self._act(self._output_commit.refuse(name, error.code, str(error)))

    def _refuse_key(self, route: bytes, what: str, why: str) -> None:
        if may_log(self._dispatcher.state.ledger, "wrong_key"):
            log.warning("%s from %r refused: %s", what, self._peers.name(route), why)
        self._refuse(route, Refused(code="wrong_key", message=why, fatal=True))

    def _refuse(self, route: bytes, refusal: Refused) -> None:
        """Refuse a message of a connection that has no right to the name that it says."""
        self._dispatcher.state.ledger.refuse(refusal.code)
        self._act([Send(unnamed(route), refusal)])

    def _act(self, actions: list[Send]) -> None:
        """Send these messages, and schedule one flush of the journal for all messages handled until then."""
        self._peers.send(actions)
        if not self._flushing:
            self._flushing = True
            if not self._peers.pumping:
                asyncio.get_running_loop().call_soon(self._flush)

    def _after_batch(self) -> None:
        if self._flushing:
            self._flush()

    def _flush(self) -> None:
        self._flushing = False
        if self._broken is not None or self._ended:
            return
        try:
            self._peers.send(self._output_commit.flush())
        except JournalError as error:
            # The journal cannot be relied on, so the broker must not confirm anything more.
            log.critical("the journal has failed", exc_info=True)
            # Not a JournalError, which is final: a restart may help.
            self._broken = BrokerError(str(error))
            self._stop.set()

    def _release(self) -> None:
        if self._broken is None:
            self._peers.send(self._output_commit.release())
