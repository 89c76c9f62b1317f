"""How an actor asks generators for tokens: a turn, the chunks of its answer, connections, the choice among them."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from actors.errors import GenerationFailed, NoGenerator, TurnRefused
from actors.sampled import FinishReason, Routes, Sampled, nothing, routes_in, together
from envs.base import ChatMessage
from protocol.arrays import SAMPLED_ARRAYS, TOKEN_ARRAYS
from protocol.codec import Frames, encode, encode_arrays, messages_in, unpack_arrays
from protocol.errors import KeysUnusable, ProtocolError
from protocol.messages.episodes import Sampling
from protocol.messages.peers import Abort, Chunk, Drain, Generate, GeneratorInfo, Goodbye, Stay
from protocol.security.client import ClientKeys
from protocol.sockets import connect

log = logging.getLogger(__name__)

Known = TypeVar("Known", int, int | None)


@dataclass(frozen=True)
class TurnRequest:
    """One action turn: continue ``prompt`` by at most ``max_tokens`` tokens."""

    trajectory_id: str
    turn: int
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    min_policy_version: int = 0
    stop_token_ids: tuple[int, ...] = ()
    preferred: str = ""
    begun: int = 0
    """Tokens at the end of ``prompt`` that belong to this turn already. They change the seed."""
    evaluates: bool = False
    """True for a turn of an evaluation task, which generators that only evaluate answer, where there are some."""
    routes_from: int | None = None
    """First token of ``prompt`` whose experts are not known; None: nobody wants to know them."""
    messages: Sequence[ChatMessage] = ()
    """What ``prompt`` says, for a teacher, which has other tokens. Only in a task that names a policy."""


def why_complete(request: TurnRequest, received: Sequence[Sampled]) -> FinishReason:
    """Return the finish reason of a turn that is complete although its last chunk was lost, else ""."""
    last = next((sampled for sampled in reversed(received) if len(sampled)), None)
    if last is not None and last.token_ids[-1] in request.stop_token_ids:
        return "stop"
    return "length" if sum(map(len, received)) >= request.max_tokens else ""


def generate_message(request_id: str, request: TurnRequest, received: Sequence[Sampled]) -> Frames:
    """Return the frames that ask a generator for the rest of a turn.

    Args:
        request_id: id of this attempt, by which its chunks are known.
        received: tokens of the turn that earlier attempts have brought. They follow the prompt.
    """
    sampling, tokens = request.sampling, sum(map(len, received))
    seed, begun = sampling.seed, request.begun + tokens
    message = Generate(
        request_id=request_id,
        max_tokens=request.max_tokens - tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        # Each turn, and each continuation of a turn, draws from a separate random stream.
        seed=None if seed is None else (seed + 1_000_003 * request.turn + 7_919 * begun) % 2**31,
        stop_token_ids=list(request.stop_token_ids),
        min_policy_version=request.min_policy_version,
        routes_from=routed(request.routes_from, received),
    )
    prompt = [np.array(request.prompt, np.int32), *(sampled.token_ids for sampled in received)]
    return encode_arrays(message, {"token_ids": np.concatenate(prompt)})


def routed(known: Known, received: Sequence[Sampled]) -> Known:
    """Return the first token of a turn's context whose experts are not known, once these tokens are here.

    Args:
        known: the same before they came; None: nobody wants to know.
    """
    for sampled in received:
        if known is not None and sampled.routes is not None:
            known = sampled.routes.reach(known)
    return known


SETTLE_S = 1.0
"""Longest wait for the first handshakes before an actor with other generators begins episodes."""
STAY_EVERY_S = 1.0
"""Time between two `Stay` to a draining generator."""
GOLDEN = 0.6180339887498949
"""Fractional part of the golden ratio: its multiples modulo 1 spread evenly, however many there are."""


@dataclass(frozen=True)
class Arrived:
    """A chunk of an answer, and its body."""

    chunk: Chunk
    frames: Sequence[bytes | memoryview]


class GeneratorConnection:
    """Connection to one generator, which ZeroMQ makes again whenever it ends.

    Args:
        info: the generator, as the broker lists it.
        actor: peer name of this actor.
        keys: folder of the keys. None means that nothing is encrypted.
        on_change: called when `serves` or `settles` may have changed.
        needed: returns the number of episodes that need a draining generator.
        clock: returns monotonic seconds.

    Raises:
        KeysUnusable: a key is missing or cannot be used.
    """

    def __init__(
        self,
        info: GeneratorInfo,
        actor: str,
        keys: Path | None,
        *,
        on_change: Callable[[], None],
        needed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.streams: dict[str, asyncio.Queue[Arrived | None]] = {}
        """Chunks that nobody has read yet, by request. None wakes the reader."""
        self.suspect_until = 0.0
        self.leaving = self.draining = False
        """``leaving``: the broker does not list the generator any more. ``draining``: it says that it leaves soon."""
        self._on_change, self._needed, self._clock = on_change, needed, clock
        self._greeted, self._said, self._reported = 0, 0.0, (False, True)
        self._made = clock()
        own = None
        if keys is not None:
            own = ClientKeys.read(keys, "actor", actor, "generator", info.peer, info.public_key)
        self._socket, self._watch = connect(info.endpoint, actor, own, "generator", self._received)
        self._socket.after_look = self._handshake_looked_at

    @property
    def lets_in(self) -> bool:
        """Whether the generator has let this actor in, and the broker lists it."""
        return self._watch.connected and not self.leaving

    @property
    def serves(self) -> bool:
        """Whether an episode may begin that relies on this generator."""
        return self.lets_in and not self.draining

    @property
    def settles(self) -> bool:
        """Whether this connection is new and its first handshake is not over."""
        return not (
            self.leaving or self._greeted or self._watch.why or self._clock() - self._made >= SETTLE_S
        )

    @property
    def why(self) -> str:
        """Why the last handshake failed, with the cure; "" if it succeeded."""
        return self._watch.why

    def reaches(self, info: GeneratorInfo) -> bool:
        """Return whether this connection leads to the generator as the broker lists it now."""
        mine = self.info
        return (mine.endpoint, mine.public_key) == (info.endpoint, info.public_key)

    def send(self, frames: Frames) -> None:
        self._socket.send(frames)

    def close(self) -> None:
        """Say Goodbye, so that a draining generator need not wait for this actor, and close."""
        if self._watch.connected:
            self._socket.send(encode(Goodbye()))
        self._socket.close()

    def _received(self, frames: list[bytes]) -> None:
        for message, rest in messages_in(frames, "a generator"):
            if isinstance(message, Drain) and not self.draining:
                log.info("generator %s drains: %s", self.info.peer, message.reason)
                self.draining = True
                self._report_change()
                self._send_stay()
            # Chunks with other ids belong to requests that have ended here.
            if isinstance(message, Chunk) and message.request_id in self.streams:
                self.streams[message.request_id].put_nowait(Arrived(message, rest))

    def _handshake_looked_at(self) -> None:
        if self._watch.connections != self._greeted and self._watch.connected:
            # A new connection may lead to a new process, which does not drain.
            self._greeted, self.draining = self._watch.connections, False
            self._report_change()
            self._send_stay()
        self._report_change()
        if self.draining and self._clock() - self._said >= STAY_EVERY_S:
            self._send_stay()

    def _report_change(self) -> None:
        now = self.serves, self.settles
        if now != self._reported:
            self._reported = now
            self._on_change()

    def _send_stay(self) -> None:
        self._said = self._clock()
        self._socket.send(encode(Stay(episodes=self._needed())))


def connection_order(generators: Iterable[str], place: int) -> dict[str, float]:
    """Return the rank of each generator for the actor at this place; the lowest one comes first.

    Generators stand on a circle, in the order of their names. Each actor begins at another point of it. An actor
    sees its own requests alone, so without different orders all actors would choose the same generators. If all
    actors together run twice as many requests as there are generators, then no generator is idle.

    Args:
        generators: names of the generators.
        place: number of the actor among all actors, from 0 on (`protocol.messages.peers.Welcome.place`).

    Example:
        >>> ranks = connection_order(["g0", "g1", "g2", "g3"], place=1)
        >>> sorted(ranks, key=ranks.get)
        ['g3', 'g0', 'g1', 'g2']
    """
    names = sorted(generators)
    return {name: (i / len(names) - place * GOLDEN) % 1.0 for i, name in enumerate(names)}


FAILED_REASONS = ("error", "abort")
"""Finish reasons with which a generator ends an answer before the turn is complete: the request is at fault, or
the generator cannot go on."""


class AnswerInterrupted(Exception):
    """A generator did not complete the turn."""


def check_offset(chunk: Chunk, have: int, count: int) -> None:
    """Check that a chunk continues the tokens received so far.

    An empty chunk that reports a failure always passes.

    Raises:
        AnswerInterrupted: there is a gap or an overlap, so the tokens do not continue this text.
    """
    if chunk.offset == have or (count == 0 and chunk.finish_reason in FAILED_REASONS):
        return
    if chunk.offset > have:
        raise AnswerInterrupted(f"tokens {have}..{chunk.offset - 1} were lost on the way")
    raise AnswerInterrupted(f"a chunk begins at token {chunk.offset}, {have} are here already")


def sampled_of(arrived: Arrived, peer: str) -> Sampled:
    """Return the tokens of a chunk.

    Args:
        peer: name of the generator that sent it.

    Raises:
        AnswerInterrupted: the arrays are missing, damaged, or hold a log-probability that is not finite, or rows of
            experts are not those of consecutive tokens.
    """
    chunk = arrived.chunk
    reason = chunk.finish_reason
    finish_reason: FinishReason = reason if reason == "stop" or reason == "length" else ""
    if not chunk.arrays:
        return nothing(finish_reason=finish_reason, generator=peer)
    try:
        arrays = unpack_arrays(chunk.arrays, arrived.frames[0])
        typed = {name: arrays[name].astype(TOKEN_ARRAYS[name], copy=False) for name in SAMPLED_ARRAYS}
        sampled = Sampled(
            **typed, finish_reason=finish_reason, kv=chunk.kv, generator=peer, routes=routes_in(arrays)
        )
    except (ProtocolError, ValueError, KeyError, IndexError) as error:
        raise AnswerInterrupted(f"chunk without usable arrays: {error!r}") from None
    if not np.isfinite(sampled.logp_behaviour).all():
        raise AnswerInterrupted("chunk with a log-probability that is not finite")
    if (rows := sampled.routes) is not None and (rows.tokens[0] < 0 or (np.diff(rows.tokens) != 1).any()):
        raise AnswerInterrupted("chunk with rows of experts that are not those of consecutive tokens")
    return sampled


def with_held(sampled: Sampled, held: list[Routes]) -> Sampled:
    """Return tokens with the rows of experts that came before them, which are removed from ``held``.

    Rows that come without tokens are held, because a turn begins with its first token.
    """
    if sampled.routes is not None:
        held.append(sampled.routes)
    if not len(sampled) or not held:
        return replace(sampled, routes=None)
    routes = together(held)
    held.clear()
    return replace(sampled, routes=routes)


LEAVING_S = 2.0
"""Longest wait for a chunk of a generator that the broker no longer lists."""
SUSPECT_S = 10.0
"""Time after a generator's failure during which `GeneratorPool` prefers others."""
NO_GENERATOR_S = 120.0
"""Longest wait for a generator that the broker lists and that lets this actor in."""
MAX_ATTEMPTS = 5
RETRY_S = 0.25


class GeneratorPool:
    """Connections to the generators that the broker lists as healthy.

    Args:
        name: peer name of this actor.
        timeout_s: longest wait for a chunk. Generators send an empty one every few seconds while a request is
            under way. Then the request goes to a different generator.
        clock: returns monotonic seconds.
        keys: folder of the keys. None means that nothing is encrypted.
        on_change: called when `serves` may have changed.
        episodes: returns the number of episodes that this actor runs.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        keys: Path | None = None,
        on_change: Callable[[], None] = lambda: None,
        episodes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._name, self._timeout_s, self._clock, self._keys = name, timeout_s, clock, keys
        self._on_change, self._episodes = on_change, episodes
        self._served = False
        self._generators: dict[str, GeneratorConnection] = {}
        self._place, self._order = 0, dict[str, float]()
        self._changed = asyncio.Event()
        self._counter = itertools.count()
        self.interruptions = self.chunks = 0
        self.waiting = 0
        """Turns that wait for a generator, each at most `NO_GENERATOR_S`."""

    @property
    def serves(self) -> bool:
        """Whether any generator has let this actor in, and does not drain: new episodes may begin.

        At first it is False until the handshakes with all generators are over, so that the first episodes spread.
        """
        return self._served

    @property
    def trouble(self) -> str:
        """Why no generator serves this actor, with the cure; "" if one does."""
        if self.serves:
            return ""
        if not self._generators:
            return "the broker lists no generator; is one running?"
        whys = [f"{name}: {generator.why}" for name, generator in self._generators.items() if generator.why]
        return f"no generator serves it: {'; '.join(whys) or 'all of them drain, or do not answer'}"

    def placed(self, place: int) -> None:
        """Note the place that the broker gives this actor. It decides between equally busy generators."""
        self._place = place
        self._order = connection_order(self._generators, place)

    def update(self, infos: Sequence[GeneratorInfo]) -> None:
        """Replace the list of generators. Running requests of one that has left go on, with less patience."""
        listed = {info.peer: info for info in infos}
        for peer, generator in list(self._generators.items()):
            info = listed.get(peer)
            if info is not None and generator.reaches(info):
                generator.info, generator.leaving = info, False
            elif not generator.leaving:
                self._leave_generator(generator)
        for info in infos:
            current = self._generators.get(info.peer)
            if current is None or not current.reaches(info):
                try:
                    self._generators[info.peer] = self._connect(info)
                except KeysUnusable as error:
                    log.error("generator %s cannot be asked: %s", info.peer, error)
        self._order = connection_order(listed, self._place)
        self._note_change()

    async def turn(self, request: TurnRequest) -> AsyncGenerator[Sampled, None]:
        """Sample one action turn, on several generators if some fail. Tokens once received are kept.

        Raises:
            TurnRefused: a generator says that the request itself is at fault.
            GenerationFailed: `MAX_ATTEMPTS` attempts failed.
            NoGenerator: no generator that the broker lists let this actor in within `NO_GENERATOR_S`.
        """
        received: list[Sampled] = []
        preferred, failures = request.preferred, list[str]()
        while len(failures) < MAX_ATTEMPTS:
            generator = await self._choose_generator(
                preferred, after_failure=bool(failures), evaluates=request.evaluates
            )
            try:
                async with aclosing(self._stream_answer(generator, request, received)) as stream:
                    async for sampled in stream:
                        received.append(sampled)
                        yield sampled
                        if sampled.finish_reason:
                            return
            except AnswerInterrupted as why:
                failures.append(f"{generator.info.peer}: {why}")
                log.warning(
                    "turn %s of %s interrupted: %s", request.turn, request.trajectory_id, failures[-1]
                )
            self.interruptions += 1
            generator.suspect_until = self._clock() + SUSPECT_S
            preferred = ""
            if reason := why_complete(request, received):
                yield nothing(finish_reason=reason, generator=generator.info.peer)
                return
        raise GenerationFailed(f"{MAX_ATTEMPTS} attempts failed: {'; '.join(failures)}")

    def close(self) -> None:
        for generator in self._generators.values():
            generator.close()
        self._generators.clear()

    def _connect(self, info: GeneratorInfo) -> GeneratorConnection:
        return GeneratorConnection(
            info, self._name, self._keys, on_change=self._note_change, needed=self._needed, clock=self._clock
        )

    def _needed(self) -> int:
        """Return how many episodes need a draining generator."""
        return 0 if self.serves else self._episodes()

    def _note_change(self) -> None:
        """Wake the turns that wait for a generator, and call ``on_change``."""
        generators = self._generators.values()
        self._served = any(g.serves and not g.info.evaluates for g in generators) and (
            self._served or not any(generator.settles for generator in generators)
        )
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    def _leave_generator(self, generator: GeneratorConnection) -> None:
        generator.leaving = True
        for inbox in generator.streams.values():
            # None wakes the reader, so that it waits with the new, shorter patience.
            inbox.put_nowait(None)
        self._forget_if_idle(generator)

    def _forget_if_idle(self, generator: GeneratorConnection) -> None:
        if generator.leaving and not generator.streams:
            generator.close()
            if self._generators.get(generator.info.peer) is generator:
                del self._generators[generator.info.peer]

    def _usable(self, *, evaluates: bool) -> list[GeneratorConnection]:
        """Return the generators that may answer a turn now.

        Where the broker lists generators that only evaluate, they answer all turns of evaluation tasks and no others:
        any other generator would sample with a newer version.
        """
        listed = [g for g in self._generators.values() if not g.leaving]
        apart = evaluates and any(g.info.evaluates for g in listed)
        return [g for g in listed if g.lets_in and g.info.evaluates == apart]

    async def _choose_generator(
        self, preferred: str, *, after_failure: bool, evaluates: bool = False
    ) -> GeneratorConnection:
        until = self._clock() + NO_GENERATOR_S
        while True:
            usable = self._usable(evaluates=evaluates)
            if usable:
                break
            changed = self._changed
            self.waiting += 1
            try:
                await asyncio.wait_for(changed.wait(), until - self._clock())
            except TimeoutError:
                raise NoGenerator(f"waited {NO_GENERATOR_S:g} s: {self.trouble}") from None
            finally:
                self.waiting -= 1
        now = self._clock()
        chosen = min(
            usable,
            key=lambda g: (
                g.suspect_until > now,
                g.draining,
                # Its tokens would be too old for the learner.
                g.info.behind,
                g.info.peer != preferred,
                len(g.streams),
                self._order.get(g.info.peer, 1.0),
            ),
        )
        if after_failure and chosen.suspect_until > now:
            # All usable generators have failed lately: pause instead of trying again at once.
            await asyncio.sleep(RETRY_S)
        return chosen

    async def _stream_answer(
        self, generator: GeneratorConnection, request: TurnRequest, received: Sequence[Sampled]
    ) -> AsyncGenerator[Sampled, None]:
        """Send one request to one generator, and yield its tokens.

        Raises:
            AnswerInterrupted: the answer stopped before its end.
            TurnRefused: the request itself is at fault.
        """
        request_id = f"{request.trajectory_id[-200:]}#{request.turn}.{next(self._counter)}"
        inbox: asyncio.Queue[Arrived | None] = asyncio.Queue()
        generator.streams[request_id] = inbox
        generator.send(generate_message(request_id, request, received))
        over, have, held = False, 0, list[Routes]()
        try:
            while not over:
                arrived = await self._next_chunk(generator, inbox)
                self.chunks += 1
                chunk = arrived.chunk
                over = chunk.finish_reason != ""
                sampled = with_held(sampled_of(arrived, generator.info.peer), held)
                check_offset(chunk, have, len(sampled))
                have += len(sampled)
                if len(sampled) or sampled.finish_reason:
                    yield sampled
                if chunk.finish_reason == "error":
                    raise TurnRefused(f"{generator.info.peer} refused a request: {chunk.error}")
                if chunk.finish_reason == "abort":
                    raise AnswerInterrupted(chunk.error or "aborted")
        finally:
            del generator.streams[request_id]
            if not over:
                generator.send(encode(Abort(request_id=request_id)))
            self._forget_if_idle(generator)

    async def _next_chunk(
        self, generator: GeneratorConnection, inbox: "asyncio.Queue[Arrived | None]"
    ) -> Arrived:
        while True:
            patience = min(LEAVING_S, self._timeout_s) if generator.leaving else self._timeout_s
            try:
                # asyncio.timeout, because wait_for would make a task for each chunk.
                async with asyncio.timeout(patience):
                    arrived = await inbox.get()
            except TimeoutError:
                gone = ", and the broker no longer lists it" if generator.leaving else ""
                gone += f"; {generator.why}" if generator.why else ""
                raise AnswerInterrupted(f"no word for {patience:g} s{gone}") from None
            if arrived is not None:
                return arrived
