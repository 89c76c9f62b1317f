"""The broker process: frames to messages to the state, its actions to frames; a journal under it, HTTP beside it.

No message leaves before what it rests on stands in the journal (output commit): what anybody was ever told is
still true after the process was killed.
"""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import time
from functools import partial
from pathlib import Path

import zmq
from aiohttp import web

from broker.books import Send
from broker.config import BrokerConfig
from broker.desk import Desk
from broker.errors import BindRefused, BooksBroken
from broker.status import prometheus, status
from protocol.codec import decode, encode, encode_delivery
from protocol.errors import LimitExceeded, LinkDown, ProtocolError, VersionMismatch
from protocol.link import AsyncSocket, router
from protocol.messages import Deliver, Goodbye, Hello

log = logging.getLogger(__name__)

TICK_S = 0.05
HTTP_STOP_S = 1.0


def serve(
    config: BrokerConfig,
    *,
    run: str,
    max_policy_lag: int,
    journal: Path | None = None,
    accept_loss: bool = False,
) -> None:
    """Serve until SIGTERM, then drain: peers get `broker.state.DRAIN_S` seconds to say Goodbye.

    Args:
        journal: folder of the journal; what it holds is taken up again. None: everything is lost with the process.
        accept_loss: go on although the journal is damaged.

    Raises:
        BindRefused: an address is not of this host alone, or is taken.
        JournalError: the journal is another run's, in use, or damaged.
        BooksBroken: a fault of the broker; started again, it goes on from the journal.
    """
    check_endpoint(config.endpoint)
    host, port = split_http(config.http)
    try:
        desk = Desk.open(config, run, max_policy_lag, journal, accept_loss)
        asyncio.run(Service(config, desk).run(host, port))
    finally:
        zmq.Context.instance().destroy(linger=1_000)  # lets the last answers out


def check_endpoint(endpoint: str) -> None:
    """Refuse an endpoint that other hosts can reach: nothing on the wire is encrypted or authenticated yet.

    Example:
        >>> check_endpoint("tcp://127.0.0.1:5555"); check_endpoint("ipc:///tmp/broker")
        >>> check_endpoint("tcp://0.0.0.0:5555")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        broker.errors.BindRefused: broker.endpoint tcp://0.0.0.0:5555: only loopback and ipc may be bound...
    """
    if endpoint.startswith("ipc://"):
        return
    if not endpoint.startswith("tcp://") or not _is_loopback(endpoint[len("tcp://") :].rpartition(":")[0]):
        raise BindRefused(
            f"broker.endpoint {endpoint}: only loopback and ipc may be bound, because messages are neither "
            "encrypted nor authenticated; use tcp://127.0.0.1:PORT and, for other hosts, an SSH tunnel"
        )


def split_http(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; refuses a host that is not loopback.

    Example:
        >>> split_http("127.0.0.1:8080")
        ('127.0.0.1', 8080)
    """
    host, _, port = address.rpartition(":")
    if not _is_loopback(host) or not port.isdecimal():
        raise BindRefused(
            f"broker.http {address}: must be host:port with a loopback host, because whoever reaches it can "
            "read it; use 127.0.0.1:PORT"
        )
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Service:
    """Sockets and clock around a `Desk`."""

    def __init__(self, config: BrokerConfig, desk: Desk) -> None:
        self._config, self._desk, self._state = config, desk, desk.state
        self._socket: AsyncSocket | None = None
        self._stop = asyncio.Event()
        self._flushing = False
        self._broken: BooksBroken | None = None

    async def run(self, host: str, port: int) -> None:
        """Bind, serve until SIGTERM or SIGINT, drain."""
        loop = asyncio.get_running_loop()
        self._desk.on_durable = partial(loop.call_soon_threadsafe, self._release)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._bind()
        runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=HTTP_STOP_S)
        await runner.setup()
        try:
            await self._bind_http(runner, host, port)
            while not self._stop.is_set():
                self._act(self._desk.tick(time.monotonic()))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), TICK_S)
            if self._broken is not None:
                raise self._broken
            await self._drain()
        finally:
            self._desk.on_durable = lambda: None
            if self._socket is not None:
                self._socket.close()
            self._desk.close()
            await runner.cleanup()

    def _bind(self) -> None:
        plain = router(zmq.Context.instance())
        try:
            plain.bind(self._config.endpoint)
        except zmq.ZMQError as error:
            plain.close()
            raise BindRefused(f"broker.endpoint {self._config.endpoint}: {error}") from None
        self._socket = AsyncSocket(plain, self._received)
        log.info("peers connect to %s", plain.getsockopt_string(zmq.LAST_ENDPOINT))

    async def _bind_http(self, runner: web.AppRunner, host: str, port: int) -> None:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise BindRefused(f"broker.http {self._config.http}: {error}") from None
        log.info("http://%s:%d/status", *runner.addresses[0][:2])

    async def _drain(self) -> None:
        log.info("draining: %d peers are connected", len(self._state.books.peers))
        self._act(self._desk.drain("the broker is ending", time.monotonic()))
        while not self._state.drained(time.monotonic()):
            self._act(self._desk.tick(time.monotonic()))
            await asyncio.sleep(TICK_S)
        log.info("ended, peers left: %s", [peer.name for peer in self._state.books.peers])

    # --- messages -----------------------------------------------------------------------------------------

    def _received(self, frames: list[bytes]) -> None:
        """One multipart message, the routing id of its sender first."""
        name = frames[0].decode("utf-8", "surrogateescape")
        try:
            message, _ = decode(frames[1:])
        except ProtocolError as error:
            log.warning("message from %r refused: %s", name, error)
            self._desk.bury(name, _code(error), str(error), frames[1:])
            self._act(self._desk.refuse(name, _code(error), str(error)))
            return
        if isinstance(message, Hello | Goodbye):
            log.info("%s from %r", type(message).__name__, name)
        try:
            self._act(self._desk.handle(name, message, frames[2:], time.monotonic()))
        except BooksBroken as error:
            log.critical("%s from %r", type(message).__name__, name, exc_info=True)
            self._broken = error
            self._stop.set()

    def _act(self, actions: list[Send]) -> None:
        """Send what may be said at once; soon, with all that has been said meanwhile, have the journal written."""
        self._send(actions)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._broken is None:
            self._send(self._desk.flush())

    def _release(self) -> None:
        if self._broken is None:
            self._send(self._desk.release())

    def _send(self, actions: list[Send]) -> None:
        assert self._socket is not None
        for action in actions:
            try:
                if isinstance(action.message, Deliver):
                    frames = encode_delivery(action.message, action.frames)
                else:
                    frames = encode(action.message)
                self._socket.send([action.peer.encode("utf-8", "surrogateescape"), *frames])
            except (LimitExceeded, LinkDown) as error:
                self._state.books.ledger.refuse("not_sent")
                log.error("%s to %s not sent: %s", type(action.message).__name__, action.peer, error)

    # --- HTTP ---------------------------------------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=1024)
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(status(self._state, time.monotonic()) | {"journal": self._desk.status()})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = prometheus(self._state, time.monotonic())
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _code(error: ProtocolError) -> str:
    match error:
        case VersionMismatch():
            return "version"
        case LimitExceeded():
            return "limit"
        case _:
            return "malformed"
