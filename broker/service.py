"""The broker process: frames to messages to the state, its actions to frames; and HTTP beside it."""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import time

import zmq
from aiohttp import web

from broker.books import Send
from broker.config import BrokerConfig
from broker.errors import BindRefused
from broker.state import BrokerState
from broker.status import prometheus, status
from protocol.codec import decode, encode, encode_delivery
from protocol.errors import LimitExceeded, LinkDown, ProtocolError, VersionMismatch
from protocol.link import AsyncSocket, router
from protocol.messages import Deliver, Goodbye, Hello

log = logging.getLogger(__name__)

TICK_S = 0.05
HTTP_STOP_S = 1.0


def serve(config: BrokerConfig, *, run: str, max_policy_lag: int) -> None:
    """Serve until SIGTERM, then drain: peers get `broker.state.DRAIN_S` seconds to say Goodbye.

    Raises:
        BindRefused: an address is not of this host alone, or is taken.
    """
    check_endpoint(config.endpoint)
    host, port = split_http(config.http)
    try:
        asyncio.run(Service(config, run=run, max_policy_lag=max_policy_lag).run(host, port))
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
    """Sockets and clock around a `BrokerState`."""

    def __init__(self, config: BrokerConfig, *, run: str, max_policy_lag: int) -> None:
        self._config = config
        self._state = BrokerState(
            config,
            run=run,
            max_policy_lag=max_policy_lag,
            now=time.monotonic(),
            boot=format(time.time_ns(), "x"),
        )
        self._socket: AsyncSocket | None = None
        self._stop = asyncio.Event()

    async def run(self, host: str, port: int) -> None:
        """Bind, serve until SIGTERM or SIGINT, drain."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._bind()
        runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=HTTP_STOP_S)
        await runner.setup()
        try:
            await self._bind_http(runner, host, port)
            while not self._stop.is_set():
                self._act(self._state.tick(time.monotonic()))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), TICK_S)
            await self._drain()
        finally:
            if self._socket is not None:
                self._socket.close()
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
        self._act(self._state.drain("the broker is ending", time.monotonic()))
        while not self._state.drained(time.monotonic()):
            self._act(self._state.tick(time.monotonic()))
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
            self._act(self._state.refuse(name, _code(error), str(error)))
            return
        if isinstance(message, Hello | Goodbye):
            log.info("%s from %r", type(message).__name__, name)
        try:
            actions = self._state.handle(name, message, frames[2:], time.monotonic())
        except Exception:  # one message must not end the run
            log.exception("%s from %r could not be handled", type(message).__name__, name)
            actions = self._state.refuse(
                name, "broker_fault", "a fault of the broker; its log has the details"
            )
        self._act(actions)

    def _act(self, actions: list[Send]) -> None:
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
        return web.json_response(status(self._state, time.monotonic()))

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
