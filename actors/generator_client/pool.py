"""An actor's connections to the generators: chooses one for each turn, and moves on if it fails."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from actors.errors import GenerationFailed, NoGenerator, TurnRefused
from actors.generator_client.chunks import AnswerInterrupted, check_offset, sampled_of, with_held
from actors.generator_client.connection import Arrived, GeneratorConnection, order
from actors.generator_client.turn_request import TurnRequest, generate_message, why_complete
from actors.sampled import Routes, Sampled, nothing
from protocol.codec import encode
from protocol.errors import KeysUnusable
from protocol.messages.generators import Abort, GeneratorInfo

log = logging.getLogger(__name__)

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
        self._order = order(self._generators, place)

    def update(self, infos: Sequence[GeneratorInfo]) -> None:
        """Replace the list of generators. Running requests of one that has left go on, with less patience."""
        listed = {info.peer: info for info in infos}
        for peer, generator in list(self._generators.items()):
            info = listed.get(peer)
            if info is not None and generator.reaches(info):
                generator.info, generator.leaving = info, False
            elif not generator.leaving:
                self._leave(generator)
        for info in infos:
            current = self._generators.get(info.peer)
            if current is None or not current.reaches(info):
                try:
                    self._generators[info.peer] = self._connect(info)
                except KeysUnusable as error:
                    log.error("generator %s cannot be asked: %s", info.peer, error)
        self._order = order(listed, self._place)
        self._news()

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
            generator = await self._choose(preferred, after_failure=bool(failures))
            try:
                async with aclosing(self._stream(generator, request, received)) as stream:
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
            info, self._name, self._keys, on_change=self._news, needed=self._needed, clock=self._clock
        )

    def _needed(self) -> int:
        """Return how many episodes need a draining generator."""
        return 0 if self.serves else self._episodes()

    def _news(self) -> None:
        """Wake the turns that wait for a generator, and call ``on_change``."""
        generators = self._generators.values()
        self._served = any(generator.serves for generator in generators) and (
            self._served or not any(generator.settles for generator in generators)
        )
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    def _leave(self, generator: GeneratorConnection) -> None:
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

    async def _choose(self, preferred: str, *, after_failure: bool) -> GeneratorConnection:
        until = self._clock() + NO_GENERATOR_S
        while True:
            usable = [g for g in self._generators.values() if g.lets_in]
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
                g.info.peer != preferred,
                len(g.streams),
                self._order.get(g.info.peer, 1.0),
            ),
        )
        if after_failure and chosen.suspect_until > now:
            # All usable generators have failed lately: pause instead of trying again at once.
            await asyncio.sleep(RETRY_S)
        return chosen

    async def _stream(
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
                arrived = await self._next(generator, inbox)
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

    async def _next(self, generator: GeneratorConnection, inbox: "asyncio.Queue[Arrived | None]") -> Arrived:
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
