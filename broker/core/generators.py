"""The broker's side towards generators: who they are, which actors they admit, which weights they load. Pure."""

from collections.abc import Sequence
from itertools import islice

from msgspec.structs import replace

from broker.core.peers import INFO_BYTES, Peer, Peers
from broker.core.state import BrokerState
from protocol.messages.fields import MAX_SOURCES
from protocol.messages.peers import ActorKeys, GeneratorInfo, Generators, WeightsReady

MAX_BYTES_S = 64e6
"""Upper limit of the bytes per second that lists of generators take, for all actors together."""


class GeneratorList:
    """Says when actors need a new list of generators.

    A change is due at once, unless a list left a moment ago. Then all changes of that moment leave as one list.
    The moment is as long as the last list took at `MAX_BYTES_S`. So the cost does not grow with the number of
    changes, and in a small fleet nobody waits. A new policy version of a generator is no change.

    Example:
        >>> from protocol.messages.peers import Hello
        >>> peers = Peers(); known = GeneratorList(peers, stall_s=8.0)
        >>> for name in ("g0", "g1"):
        ...     hello = Hello(role="generator", peer=name, incarnation=1, endpoint="tcp://10.0.0.1:1")
        ...     known.heard(peers.add(hello, now=0.0), now=0.0)
        >>> [info.peer for info in known.take(actors=1, now=0.0)]
        ['g0', 'g1']
        >>> known.take(actors=1, now=0.0) is None
        True
    """

    def __init__(self, peers: Peers, stall_s: float) -> None:
        self._peers, self._stall_s = peers, stall_s
        self.offered: list[GeneratorInfo] = []
        """Generators as actors know them: as many healthy ones as one message holds."""
        self._healthy: dict[str, tuple[str, str]] = {}
        """Endpoints and public keys of the healthy generators at the last list, by name."""
        self.is_changed = False
        """True if a generator has joined, left, moved, changed its key, stalled or recovered since the last list."""
        self._not_before = 0.0

    def heard(self, generator: Peer, now: float) -> None:
        """Look at one generator, which may have joined, moved, stalled or recovered. The cost is constant."""
        hello = generator.hello
        reached = (hello.endpoint, hello.public_key) if generator.may_serve(now, self._stall_s) else None
        if self._healthy.get(generator.name) != reached:
            self.is_changed = True

    def left(self, name: str) -> None:
        """Note that a generator is not connected any more."""
        self.is_changed = self.is_changed or name in self._healthy

    def take(self, *, actors: int, now: float) -> list[GeneratorInfo] | None:
        """Return the list to send to all actors if a new one is due now, or None.

        Args:
            actors: number of actors that will get the list.
            now: monotonic seconds.
        """
        if not self.is_changed or now < self._not_before:
            return None
        healthy = self._peers.healthy_generators(now, self._stall_s)
        self.is_changed = False
        self._healthy = {info.peer: (info.endpoint, info.public_key) for info in healthy}
        fitting = self._peers.fitting(healthy)
        if list(map(_unversioned, fitting)) == list(map(_unversioned, self.offered)):
            return None
        self.offered = fitting
        nbytes = sum(INFO_BYTES + len(info.peer) + len(info.endpoint) for info in fitting)
        self._not_before = now + actors * nbytes / MAX_BYTES_S
        return fitting


def _unversioned(info: GeneratorInfo) -> GeneratorInfo:
    return replace(info, policy_version=0)


REMIND_S = 5.0


class WeightsNews:
    """Announces the newest weights to generators, with the URLs of the hosts that have them already.

    It keeps the sources up to date with every heartbeat, so that an announcement need not look for them.
    """

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._urls: dict[str, str] = {}
        """URLs of the generators that serve the newest version, by name."""
        self._sources: dict[str, set[str]] = {}
        """Names of these generators by URL; those of one host may share a URL."""

    def published(self) -> None:
        """Announce the version that was published just now to all generators."""
        generators = self._state.peers.of("generator")
        for generator in generators:
            self.heard(generator)
        for generator in generators:
            self.announce(generator)

    def heard(self, generator: Peer) -> None:
        """Note which version a generator serves, and where."""
        newest = self._state.published
        serves = newest is not None and generator.heartbeat.policy_version == newest.version
        self._note(generator.name, generator.hello.weights_url if serves else "")

    def left(self, generator: str) -> None:
        """Note that a generator is not connected any more."""
        self._note(generator, "")

    def _note(self, name: str, url: str) -> None:
        before = self._urls.pop(name, "")
        if before and before != url:
            self._sources[before].discard(name)
            if not self._sources[before]:
                del self._sources[before]
        if url:
            self._urls[name] = url
            self._sources.setdefault(url, set()).add(name)

    def announce(self, generator: Peer) -> None:
        """Announce the newest weights to a generator, with the hosts that serve them, the learner's last."""
        newest = self._state.published
        if newest is None:
            return
        others = (url for url, names in self._sources.items() if names != {generator.name})
        ready = WeightsReady(
            epoch=newest.epoch,
            version=newest.version,
            manifest=newest.manifest,
            sources=[*islice(others, MAX_SOURCES - 1), *([newest.url] if newest.url else [])],
            root=newest.root,
        )
        self._state.outbox.send(generator.name, ready)

    def remind(self, generator: Peer, now: float) -> None:
        """Repeat the announcement, which may have been lost, if a generator serves a different version."""
        newest = self._state.published
        if newest is None or generator.heartbeat.policy_version == newest.version:
            return
        if now - generator.reminded_at >= REMIND_S:
            generator.reminded_at = now
            self.announce(generator)


class GeneratorSide:
    """The live generators, as the broker shows them to actors."""

    def __init__(self, state: BrokerState, news: WeightsNews) -> None:
        self._state, self._news = state, news
        self._list = GeneratorList(state.peers, state.config.generator_stall_s)
        self._actor_keys: list[str] | None = None
        """Public keys of actors that generators are to admit; None without encryption."""

    @property
    def offered(self) -> list[GeneratorInfo]:
        """Generators as actors know them."""
        return self._list.offered

    def joined(self, peer: Peer, now: float) -> None:
        """Tell a generator what it needs, after its Welcome."""
        self._tell_actor_keys(peer)
        self.heard(peer, now)
        self._news.heard(peer)
        self._news.announce(peer)

    def heard(self, peer: Peer, now: float) -> None:
        """Look at one generator, which may have stalled or recovered. Call it at intervals, too."""
        self._list.heard(peer, now)

    def beat(self, peer: Peer, now: float) -> None:
        """Handle the heartbeat of a generator, which says what version it serves."""
        self.heard(peer, now)
        self._news.heard(peer)
        self._news.remind(peer, now)

    def left(self, name: str) -> None:
        """Note that a generator is not connected any more."""
        self._list.left(name)
        self._news.left(name)

    def admit(self, actor_keys: Sequence[str]) -> None:
        """Note the public keys (Z85) of the actors that are admitted now; tell generators if they have changed."""
        if actor_keys != self._actor_keys:
            self._actor_keys = list(actor_keys)
            for generator in self._state.peers.of("generator"):
                self._tell_actor_keys(generator)

    def _tell_actor_keys(self, generator: Peer) -> None:
        if self._actor_keys is not None:
            self._state.outbox.send(generator.name, ActorKeys(public_keys=self._actor_keys))

    def offer(self, now: float) -> None:
        """Send the list of generators to all actors, if a new one is due."""
        actors = self._state.peers.of("actor") if self._list.is_changed else []
        offered = self._list.take(actors=len(actors), now=now)
        if offered is not None:
            # One message for all, so that it is encoded once.
            generators = Generators(generators=offered)
            for actor in actors:
                self._state.outbox.send(actor.name, generators)
