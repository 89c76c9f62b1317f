"""Takes the requests of actors from the generator's socket to the engine, and sends the answers back in chunks."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import zmq

from actors.config import GeneratorConfig
from actors.errors import EngineFailed, RequestRefused
from actors.generator.engine import ModelFacts, Request, SamplingEngine
from actors.generator.requests import (
    HOLD_TIMEOUT_S,
    Guests,
    OpenRequest,
    OpenRequests,
    RequestBook,
    unpack_prompt,
    why_invalid,
)
from actors.sampled import Sampled, nothing, pieces
from protocol.arrays import MAX_ROUTE_BYTES
from protocol.codec import AnyMessage, Buffer, Frames, decode, encode, encode_arrays, open_envelope
from protocol.direct import DirectListener, is_direct
from protocol.errors import Malformed, ProtocolError
from protocol.messages.peers import Abort, Chunk, Drain, Generate, Goodbye, Stay
from protocol.security.addresses import is_wildcard, split_endpoint
from protocol.security.guard import Guard, GuardedSocket
from protocol.security.keys import AllowList, Principal
from protocol.sockets import AsyncSocket, router

log = logging.getLogger(__name__)

MAX_HANDSHAKE_WARNINGS = 100

OnRequest = Callable[[list[bytes]], None]


class Listener:
    """Socket that actors connect to. With keys it is encrypted, and admits only actors whose key the broker admits.

    Raises:
        OSError: the address cannot be bound.
        KeysUnusable: the folder lacks keys of a generator.
    """

    def __init__(self, config: GeneratorConfig, name: str, keys: Path | None, on_frames: OnRequest) -> None:
        self._on_frames, self._strangers = on_frames, 0
        self._guard: Guard | None = None
        self._socket: AsyncSocket | DirectListener
        if is_direct(config.endpoint):
            self.endpoint = config.endpoint
            self._socket = DirectListener(config.endpoint, on_frames)
            return
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._guard = Guard(context, keys, "generator", name) if keys is not None else None
        plain = router(context) if self._guard is None else self._guard.router(context)
        try:
            plain.bind(config.endpoint)
        except zmq.ZMQError as error:
            plain.close()
            self._close_guard()
            raise OSError(f"generator.endpoint {config.endpoint}: {error}") from None
        self.endpoint = plain.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._guard is None:
            self._socket = AsyncSocket(plain, on_frames)
        else:
            self._socket = GuardedSocket(plain, self._received, self._guard)

    @property
    def public_key(self) -> str:
        """Public key (Z85) that the socket shows to actors; "" if nothing is encrypted."""
        return self._guard.public_key if self._guard is not None else ""

    def admit(self, public_keys: Sequence[str]) -> None:
        """Admit actors with these keys (Z85) and no others. Until the first call the keys folder counts."""
        if self._guard is not None:
            self._guard.admit(AllowList({key: Principal("actor", "actor", key) for key in public_keys}))

    def send(self, frames: Frames) -> None:
        """Send frames to the actor whose routing id is the first frame."""
        self._socket.send(frames)

    def close(self) -> None:
        """Close the socket. Frames that are queued are still sent."""
        self._socket.close()
        self._close_guard()

    def _received(self, frames: list[bytes], sender: Principal | None) -> None:
        if sender is not None:
            self._on_frames(frames)
            return
        self._strangers += 1
        if self._strangers <= MAX_HANDSHAKE_WARNINGS:
            log.warning("a message under a key that is admitted no more was left aside")

    def _close_guard(self) -> None:
        if self._guard is not None:
            self._guard.close()


def endpoint_for_actors(bound: str, host: str, broker: str) -> str:
    """Return the endpoint that actors connect to: the bound endpoint, with an address that they can reach.

    Args:
        bound: bound endpoint, as ZeroMQ reports it.
        host: name or address by which actors reach this host. If it is empty and the socket listens on all
            addresses, the result has the address from which this host reaches the broker.
        broker: ZeroMQ endpoint of the broker.

    Example:
        >>> endpoint_for_actors("tcp://0.0.0.0:5557", "node-7", "tcp://127.0.0.1:5755")
        'tcp://node-7:5557'
        >>> endpoint_for_actors("tcp://0.0.0.0:5557", "", "tcp://127.0.0.1:5755")
        'tcp://127.0.0.1:5557'
    """
    at, port = split_endpoint(bound)
    if not at or not (host or is_wildcard(at)):
        return bound
    return f"tcp://{host or _address_towards(broker)}:{port}"


def _address_towards(broker: str) -> str:
    host, port = split_endpoint(broker)
    if not host or is_wildcard(host):
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        # To connect a datagram socket sends nothing. It only chooses the local address.
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return f"[{own}]" if ":" in own else own


KEEP_ALIVE_S = 5.0
"""Time without a chunk after which a request's actor gets an empty one, so that it keeps waiting."""
LOOK_S = 1.0
MAX_WARNINGS = 100
NOTHING = nothing()


class Serving:
    """All requests of one generator.

    Args:
        on_failure: called with the reason when the engine is lost.
        send: sends frames to the actor whose routing id is the first frame.
    """

    def __init__(
        self,
        engine: SamplingEngine,
        config: GeneratorConfig,
        facts: ModelFacts,
        *,
        on_failure: Callable[[str], None],
        send: Callable[[Frames], None] = lambda frames: None,
    ) -> None:
        self.book = RequestBook(time.monotonic())
        self.guests = Guests()
        self.send = send
        self._engine, self._config, self._facts = engine, config, facts
        self._on_failure = on_failure
        self._open = OpenRequests()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused = 0
        self._looked = 0.0
        self._closing = self._reason = ""

    def received(self, frames: list[bytes]) -> None:
        """Handle one envelope of an actor. The first frame is the actor's routing id."""
        actor = frames[0]
        try:
            messages = open_envelope(frames[1:])
        except ProtocolError as error:
            self._refused_from(actor, error)
            return
        for one in messages:
            try:
                self._take_message(actor, *decode(one))
            except ProtocolError as error:
                self._refused_from(actor, error)
            except Exception:
                # The other messages of the envelope are still handled.
                log.exception("a message from actor %r could not be handled", actor)

    def _take_message(self, actor: bytes, message: AnyMessage, rest: Sequence[Buffer]) -> None:
        match message:
            case Generate():
                self._begin_request(actor, message, unpack_prompt(message, rest))
            case Abort():
                self._abort_request(actor, message.request_id)
            case Stay():
                if self.guests.heard(actor, message.episodes, time.monotonic()):
                    self._tell_drain(actor)
            case Goodbye():
                self.guests.left(actor)
            case _:
                raise Malformed(f"{type(message).__name__} is not for a generator")

    def _refused_from(self, actor: bytes, error: ProtocolError) -> None:
        self._refused += 1
        # The limit keeps a peer that sends invalid messages from filling the disk with logs.
        if self._refused <= MAX_WARNINGS:
            log.error("message from actor %r refused: %s", actor, error)

    @property
    def running(self) -> int:
        """Number of requests that the engine works on."""
        return self.book.running

    def needed(self, now: float) -> int:
        """Return for how many episodes a draining generator is to stay, see `Guests.needed`."""
        return self.guests.needed(now)

    def catch_up_with(self, version: int) -> None:
        """Hold all requests until this version is in service."""
        self.book.gate = version

    def updated(self) -> None:
        """Start the held requests that the new version allows. A late joiner has caught up by now."""
        self.book.gate = 0
        for key in self.book.start_held(version=self._engine.version, now=time.monotonic()):
            self._start_request(self._open[key])

    def expire(self, now: float) -> None:
        """Answer requests that have waited too long for a policy version."""
        for key, version in self.book.expire(now):
            have = self._engine.version
            self._give_up(
                self._open[key],
                f"waited {HOLD_TIMEOUT_S:g} s for policy version {version}, in service is {have}; "
                "does the learner publish, and can this generator read what it publishes?",
            )

    def keep_alive(self, now: float) -> None:
        """Send an empty chunk for each request that is under way and whose actor has not heard for a while.

        An actor thus tells a generator that is slow from one that is gone.
        """
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        for entry in self._open:
            if now - entry.heard >= KEEP_ALIVE_S:
                entry.heard = now
                self._send_chunk(entry.actor, Chunk(request_id=entry.request_id, offset=entry.sent), NOTHING)

    def announce_drain(self, reason: str, now: float) -> None:
        """Tell the actors that this generator leaves soon. It serves them until `drain` is called."""
        self._reason = reason
        for actor in self.guests.drain(now):
            self._tell_drain(actor)

    def _tell_drain(self, actor: bytes) -> None:
        self.send([actor, *encode(Drain(reason=self._reason))])

    async def drain(self, failure: str, timeout_s: float) -> None:
        """End every request: with the tokens it has if the engine works, else with the failure."""
        self._closing = failure or "the generator is draining; send the request to another one"
        for key in self.book.keys():  # noqa: SIM118 (a method, not a mapping)
            entry = self._open[key]
            if failure:
                self._give_up(entry, f"the generator has failed: {failure}")
            elif self.book.is_held(key):
                self._abort_held(entry)
            else:
                self._spawn(self._engine.abort(key))
        if failure:
            for task in self._tasks:
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def gauges(self, now: float) -> dict[str, float]:
        rates, (idle, served) = self.book.rates(now), self.book.seconds(now)
        return {
            "tokens_per_second": rates.tokens_per_second,
            "idle_share": rates.idle_share,
            "idle_seconds_total": idle,
            "serving_seconds_total": served,
            "running_requests": float(self.book.running),
            "held_requests": float(self.book.held),
            "tokens_total": float(self.book.tokens_total),
            "policy_version": float(self._engine.version),
        }

    def _begin_request(self, actor: bytes, message: Generate, prompt: list[int]) -> None:
        if why := why_invalid(
            prompt, message, vocab_size=self._facts.vocab_size, max_model_len=self._config.max_model_len
        ):
            self._end_answer(actor, message.request_id, "error", why)
            return
        if why := self._why_not_here(actor, message.request_id):
            self._end_answer(actor, message.request_id, "abort", why)
            return
        if self.guests.asked(actor, time.monotonic()):
            self._tell_drain(actor)
        request = Request(
            id=(key := self._open.new_key()),
            prompt=prompt,
            max_tokens=message.max_tokens,
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            seed=message.seed,
            # Ids past the vocabulary are never sampled, and some engines reject them.
            stop=[i for i in message.stop_token_ids or self._facts.eos_ids if i < self._facts.vocab_size],
            routes_from=message.routes_from,
        )
        version, now = self._engine.version, time.monotonic()
        entry = self._open.add(OpenRequest(key, actor, message.request_id, request, now))
        if self.book.add(key, min_version=message.min_policy_version, version=version, now=now):
            self._start_request(entry)

    def _why_not_here(self, actor: bytes, request_id: str) -> str:
        """Return why this generator takes no such request now, or "". A different generator may take it."""
        if self._closing:
            return self._closing
        return self._open.why_no_more(actor, request_id)

    def _abort_request(self, actor: bytes, request_id: str) -> None:
        if (entry := self._open.of(actor, request_id)) is None:
            # The request has finished meanwhile, or it was sent to an earlier process of this generator.
            self._send_chunk(actor, Chunk(request_id=request_id, finish_reason="abort"), NOTHING)
        elif self.book.is_held(entry.key):
            self._abort_held(entry)
        else:
            self._spawn(self._engine.abort(entry.key))

    def _abort_held(self, entry: OpenRequest) -> None:
        self._forget_request(entry)
        self._send_chunk(entry.actor, Chunk(request_id=entry.request_id, finish_reason="abort"), NOTHING)

    def _start_request(self, entry: OpenRequest) -> None:
        self._spawn(self._run_request(entry))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_request(self, entry: OpenRequest) -> None:
        try:
            async for sampled in self._engine.generate(entry.request):
                if entry not in self._open:
                    # The request was ended meanwhile.
                    return
                self.book.tokens(len(sampled))
                entry.heard = time.monotonic()
                if sampled.finish_reason:
                    self._forget_request(entry)
                self._send_tokens(entry, sampled)
        except RequestRefused as error:
            self._forget_request(entry)
            self._end_answer(entry.actor, entry.request_id, "error", str(error), offset=entry.sent)
        except EngineFailed as error:
            self._give_up(entry, f"the generator has failed: {error}")
            self._on_failure(str(error))
        except Exception as error:
            # A bug of this generator: tell the actor at once, so that it does not wait for its timeout.
            log.exception("request %s of actor %r ended by a fault", entry.request_id, entry.actor)
            self._give_up(entry, f"a fault of the generator: {error!r}")

    def _send_tokens(self, entry: OpenRequest, sampled: Sampled) -> None:
        """Send newly sampled tokens. Rows of experts for which there is no room go before, without tokens."""
        *before, last = pieces(sampled.routes, MAX_ROUTE_BYTES)
        for routes in before:
            chunk = Chunk(request_id=entry.request_id, offset=entry.sent, kv=self._engine.kv)
            self._send_chunk(entry.actor, chunk, replace(NOTHING, routes=routes))
        chunk = Chunk(
            request_id=entry.request_id,
            offset=entry.sent,
            finish_reason=sampled.finish_reason,
            kv=self._engine.kv,
        )
        entry.sent += len(sampled)
        self._send_chunk(entry.actor, chunk, replace(sampled, routes=last))

    def _give_up(self, entry: OpenRequest, why: str) -> None:
        """End a request that is not at fault, so that its actor sends it to a different generator."""
        self._forget_request(entry)
        self._end_answer(entry.actor, entry.request_id, "abort", why, offset=entry.sent)

    def _end_answer(
        self, actor: bytes, request_id: str, reason: Literal["abort", "error"], why: str, *, offset: int = 0
    ) -> None:
        """Send the last chunk of an answer that is not whole: "error" if the request is at fault."""
        chunk = Chunk(request_id=request_id, offset=offset, finish_reason=reason, error=why[:2_000])
        self._send_chunk(actor, chunk, NOTHING)

    def _forget_request(self, entry: OpenRequest) -> None:
        self.book.finish(entry.key, time.monotonic())
        self._open.remove(entry)

    def _send_chunk(self, actor: bytes, chunk: Chunk, sampled: Sampled) -> None:
        routes = {} if sampled.routes is None else sampled.routes.arrays
        self.send([actor, *encode_arrays(chunk, sampled.arrays | routes)])
