"""The broker's side towards generators: who they are, which actors they admit, which weights they load. Pure."""

from collections.abc import Sequence

from broker.core.generators.generator_list import GeneratorList
from broker.core.generators.weights_news import WeightsNews
from broker.core.peers import Peer
from broker.core.state import BrokerState
from protocol.messages.generators import ActorKeys, GeneratorInfo, Generators


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
