"""The broker process: decodes frames, hands messages to the `Dispatcher`, sends its actions, and serves HTTP."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from aiohttp import web

from broker.config import BrokerConfig
from broker.core.peers import Send
from broker.errors import BindRefused, BrokerError, JournalError, NameInUse, StateBroken, WrongKey
from broker.output_commit import OutputCommit
from broker.peer_socket import REVOKED, PeerSocket, allow_many_connections, bind_failure, may_log, unnamed
from broker.status import prometheus, status
from protocol.codec import Buffer, decode, open_envelope
from protocol.errors import ProtocolError
from protocol.messages.fields import MAX_ITEMS
from protocol.messages.peers import Goodbye, Hello, Refused
from protocol.security.addresses import check_endpoint, split_address
from protocol.security.guard import Guard
from protocol.security.http import require_token, scheme, serving
from protocol.security.keys import AllowList, Principal


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


log = logging.getLogger(__name__)

TICK_S = 0.05
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
) -> None:
    """Serve until SIGTERM, then drain: peers get `broker.core.dispatch.DRAIN_S` seconds to say Goodbye.

    Args:
        journal: folder of the journal, from which the state is recovered. None: there is no journal, and the
            state is lost with the process.
        accept_loss: start although the journal is damaged.
        keys: folder of the keys. None: nothing is encrypted, and the broker listens to this machine only.
        http_keys: folder of the keys for HTTP with TLS and a token. None: HTTP is open to this machine.

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
        output_commit = OutputCommit.open(config, run, max_policy_lag, journal, accept_loss)
        asyncio.run(Service(config, output_commit, keys, http_keys).run(host, port))
    finally:
        # The linger lets the last answers leave.
        zmq.Context.instance().destroy(linger=1_000)


class Service:
    """Sockets and clock around an `OutputCommit`."""

    def __init__(
        self, config: BrokerConfig, output_commit: OutputCommit, keys: Path | None, http_keys: Path | None
    ) -> None:
        self._config, self._output_commit, self._dispatcher = config, output_commit, output_commit.dispatcher
        self._keys, self._http_keys = keys, http_keys
        self._peers = PeerSocket(self._dispatcher.state.ledger)
        self._admitted: AllowList | None = None
        """Allow-list of which the dispatcher knows."""
        self._stop = asyncio.Event()
        self._flushing = False
        self._broken: BrokerError | None = None

    async def run(self, host: str, port: int) -> None:
        """Bind, serve until SIGTERM or SIGINT, then drain."""
        loop = asyncio.get_running_loop()
        self._output_commit.bell.heard = partial(loop.call_soon_threadsafe, self._release)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._bind()
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._bind_http(stack, host, port)
                while not self._stop.is_set():
                    self._look_at_keys(time.monotonic())
                    self._act(self._output_commit.tick(time.monotonic()))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stop.wait(), TICK_S)
                if self._broken is not None:
                    raise self._broken
                await self._drain()
        finally:
            self._output_commit.bell.heard = lambda: None
            self._peers.close()
            self._output_commit.close()

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
        log.info("draining: %d peers are connected", len(self._dispatcher.state.peers))
        self._act(self._output_commit.drain("the broker is ending", time.monotonic()))
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
        if self._broken is not None:
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
