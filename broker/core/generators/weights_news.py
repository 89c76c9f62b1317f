"""Tells generators of policy versions: the newest one, and who serves it. Pure."""

from itertools import islice

from broker.core.peers import Peer
from broker.core.state import BrokerState
from protocol.messages.fields import MAX_SOURCES
from protocol.messages.weights import WeightsReady

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
