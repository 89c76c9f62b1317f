"""An actor's connections to generators: which comes first, whether it lets the actor in, whether it is leaving."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from protocol.codec import Frames, encode
from protocol.envelopes import messages_in
from protocol.messages.generators import Chunk, GeneratorInfo, Stay
from protocol.messages.peers import Drain, Goodbye
from protocol.security.client import ClientKeys, HandshakeWatch
from protocol.sockets import AsyncSocket, dealer

log = logging.getLogger(__name__)

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
        socket = dealer(zmq.Context.instance(), actor, own)
        self._watch = HandshakeWatch(socket, info.endpoint, own, "generator")
        socket.connect(info.endpoint)
        self._socket = AsyncSocket(socket, self._received, self._watch)
        self._socket.after_look = self._looked

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
                self._report()
                self._stay()
            # Chunks with other ids belong to requests that have ended here.
            if isinstance(message, Chunk) and message.request_id in self.streams:
                self.streams[message.request_id].put_nowait(Arrived(message, rest))

    def _looked(self) -> None:
        if self._watch.connections != self._greeted and self._watch.connected:
            # A new connection may lead to a new process, which does not drain.
            self._greeted, self.draining = self._watch.connections, False
            self._report()
            self._stay()
        self._report()
        if self.draining and self._clock() - self._said >= STAY_EVERY_S:
            self._stay()

    def _report(self) -> None:
        now = self.serves, self.settles
        if now != self._reported:
            self._reported = now
            self._on_change()

    def _stay(self) -> None:
        self._said = self._clock()
        self._socket.send(encode(Stay(episodes=self._needed())))


def order(generators: Iterable[str], place: int) -> dict[str, float]:
    """Return the rank of each generator for the actor at this place; the lowest one comes first.

    Generators stand on a circle, in the order of their names. Each actor begins at another point of it. An actor
    sees its own requests alone, so without different orders all actors would choose the same generators. If all
    actors together run twice as many requests as there are generators, then no generator is idle.

    Args:
        generators: names of the generators.
        place: number of the actor among all actors, from 0 on (`protocol.messages.peers.Welcome.place`).

    Example:
        >>> ranks = order(["g0", "g1", "g2", "g3"], place=1)
        >>> sorted(ranks, key=ranks.get)
        ['g3', 'g0', 'g1', 'g2']
    """
    names = sorted(generators)
    return {name: (i / len(names) - place * GOLDEN) % 1.0 for i, name in enumerate(names)}
