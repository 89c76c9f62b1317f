"""Which host fetches the newest weights from which: a tree of relays below the learner. Pure."""

import heapq
import logging
from collections.abc import Iterator

from broker.core.hosts import host_of
from broker.core.peers import Peer
from broker.core.state import BrokerState
from protocol.messages.fields import MAX_SOURCES
from protocol.messages.peers import SourceComplaint, WeightsReady

log = logging.getLogger(__name__)

FAN_OUT = 2
"""Hosts that the learner, and each relay, serve at a time.

All get a version in about this multiple of the time of one transfer. With one child each it would be less, but one slow
host would hold up all behind it.
"""
ROOT = ""
"""Name of the learner's host in the tree."""


class RelayTree:
    """Tree in which each host has one parent: the learner, or a host that passes on what it fetches.

    The first hosts get the learner, the others the nearest parent with a free place, one of their own rack if there is
    one. The first host of each rack takes only one place of another rack's first host, so that each has places for its
    own.

    Example:
        >>> tree = RelayTree(fan_out=2)
        >>> for number in range(7):
        ...     tree.add(f"h{number}")
        >>> [tree.parents[f"h{number}"] for number in range(7)], tree.ancestors("h6")
        (['', '', 'h0', 'h0', 'h1', 'h1', 'h2'], ['h2', 'h0'])
        >>> racks = RelayTree(fan_out=2)
        >>> for host, rack in (("a0", "a"), ("b0", "b"), ("a1", "a"), ("b1", "b")):
        ...     racks.add(host, rack)
        >>> racks.parents["a1"], racks.parents["b1"]
        ('a0', 'b0')
    """

    def __init__(self, fan_out: int = FAN_OUT) -> None:
        self.parents: dict[str, str] = {}
        self._fan_out = fan_out
        self._depths = {ROOT: 0}
        self._free = {ROOT: fan_out}
        """Places that are left of each host that passes on."""
        self._for_heads = {ROOT: fan_out}
        """Of these, places for the first hosts of racks."""
        self._anywhere = [(0, 0, ROOT)]
        self._heads = [(0, 0, ROOT)]
        self._of_rack: dict[str, list[tuple[int, int, str]]] = {}

    def add(self, host: str, rack: str = "", *, passes_on: bool = True) -> None:
        """Give a host a parent. Hosts that do not pass on should come last, because they take places and give none."""
        if host in self.parents:
            return
        is_head = bool(rack) and rack not in self._of_rack and passes_on
        if is_head:
            parent = self._nearest(self._heads, self._for_heads)
        else:
            parent = self._nearest(self._of_rack.get(rack, []), self._free)
        if parent is None:
            parent = self._nearest(self._anywhere, self._free)
        # Without a free place everybody else's server is the learner's.
        parent = parent or ROOT
        self.parents[host] = parent
        self._free[parent] -= 1
        self._for_heads[parent] -= is_head
        if passes_on:
            self._open(host, self._depths[parent] + 1, rack, is_head=is_head)

    def ancestors(self, host: str) -> list[str]:
        """Return the parent of a host, its parent and so on, without the learner."""
        found = []
        while (host := self.parents.get(host, ROOT)) != ROOT:
            found.append(host)
        return found

    def _open(self, host: str, depth: int, rack: str, *, is_head: bool) -> None:
        self._depths[host], self._free[host] = depth, self._fan_out
        self._for_heads[host] = max(1, self._fan_out // 2) if is_head else 0
        place = (depth, len(self.parents), host)
        heapq.heappush(self._anywhere, place)
        if rack:
            heapq.heappush(self._of_rack.setdefault(rack, []), place)
        if is_head:
            heapq.heappush(self._heads, place)

    def _nearest(self, places: list[tuple[int, int, str]], free: dict[str, int]) -> str | None:
        """Return the host nearest to the learner that has a place left; None if there is none."""
        while places and (free[places[0][2]] <= 0 or self._free[places[0][2]] <= 0):
            heapq.heappop(places)
        return places[0][2] if places else None


REMIND_S = 5.0
REST_S = 60.0
"""Time for which a relay that failed a host serves no further hosts. They would wait for it as long."""
LIED_TO = 2
"""Hosts to which a relay must have sent wrong bytes before nobody is sent there any more.

One host alone may have the damage in its own memory or line, and would have every relay left out.
"""


class WeightsAnnouncer:
    """Announces the newest weights to generators, each with the relays above its host, nearest first, then the learner.

    The tree is made for each version, of the hosts in the order of joining. A host that joins later takes the next
    place. A relay that is gone is left out, so that its children ask the relay above it, which has lost a child.
    """

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._members: dict[str, dict[str, Peer]] = {}
        """Generators of each host, by name."""
        self._tree = RelayTree()
        self._owners: dict[str, str] = {}
        """Generators by the URL at which they serve versions."""
        self._lied_to: dict[str, set[str]] = {}
        """Hosts that got wrong bytes from a relay, by its URL, until its generator has gone."""
        self._rest_until: dict[str, float] = {}
        self._said: dict[str, set[SourceComplaint]] = {}
        """Complaints of each generator that were counted, by its name. One that stands counts once."""

    def published(self, now: float) -> None:
        """Announce the version that was published just now to all generators."""
        self._tree = RelayTree()
        self._rest_until = {url: until for url, until in self._rest_until.items() if until > now}
        generators = self._state.peers.of("generator")
        hosts = dict.fromkeys(_host(peer) for peer in sorted(generators, key=lambda peer: peer.joined))
        for host in sorted(hosts, key=lambda host: not self._passes_on(host)):
            self._place(host)
        for generator in generators:
            self.announce(generator)

    def joined(self, generator: Peer) -> None:
        """Give a generator that has joined a place, and announce the newest weights to it."""
        self._members.setdefault(_host(generator), {})[generator.name] = generator
        if generator.hello.weights_url:
            self._owners[generator.hello.weights_url] = generator.name
        self._place(_host(generator))
        self.announce(generator)

    def note_gone(self, generator: Peer) -> None:
        """Note that a generator is not connected any more."""
        there = self._members.get(_host(generator), {})
        there.pop(generator.name, None)
        if not there:
            self._members.pop(_host(generator), None)
        self._said.pop(generator.name, None)
        self._owners.pop(generator.hello.weights_url, None)
        self._lied_to.pop(generator.hello.weights_url, None)
        self._rest_until.pop(generator.hello.weights_url, None)

    def announce(self, generator: Peer) -> None:
        """Announce the newest weights to a generator."""
        newest = self._state.published
        if newest is None:
            return
        sources = [*self._above(_host(generator)), newest.url] if newest.url else []
        ready = WeightsReady(
            epoch=newest.epoch,
            version=newest.version,
            manifest=newest.manifest,
            sources=sources,
            root=newest.root,
            ordered=len(sources) > 1,
        )
        self._state.outbox.send(generator.name, ready)

    def beat(self, generator: Peer, now: float) -> None:
        """Note what a generator says of its sources, and remind it of the newest version if it serves another one.

        The announcement may have been lost, or its sources have failed.
        """
        # Who is complained of may not have joined yet, after a restart of the broker.
        known = {each for each in generator.heartbeat.complaints if each.url in self._owners}
        before = self._said.get(generator.name, set())
        for complaint in known - before:
            self._note_complaint(generator, complaint, now)
        self._said[generator.name] = known | before.intersection(generator.heartbeat.complaints)
        newest = self._state.published
        if newest is None or generator.heartbeat.policy_version == newest.version:
            return
        if now - generator.reminded_at >= REMIND_S:
            generator.reminded_at = now
            self.announce(generator)

    def _note_complaint(self, generator: Peer, complaint: SourceComplaint, now: float) -> None:
        lied_to = self._lied_to.setdefault(complaint.url, set()) if complaint.lied else set()
        if _host(generator) in lied_to:
            # Another generator of the host, which fetches into the same memory.
            return
        self._rest_until[complaint.url] = now + REST_S
        if not complaint.lied:
            return
        lied_to.add(_host(generator))
        log.warning(
            "%s has sent wrong weights to %s; %s, so look at both hosts",
            self._owners[complaint.url],
            generator.name,
            f"it did so to {len(lied_to)} hosts, and nobody is sent to {complaint.url} any more"
            if len(lied_to) >= LIED_TO
            else f"that host is not sent to {complaint.url} any more",
        )

    def _place(self, host: str) -> None:
        if not self._reads_in_place(host):
            rack = next((peer.hello.rack for peer in self._members.get(host, {}).values()), "")
            self._tree.add(host, rack, passes_on=self._passes_on(host))

    def _passes_on(self, host: str) -> bool:
        """Return whether further hosts may be sent to a host now."""
        url = self._url(host)
        return bool(url) and url not in self._rest_until

    def _above(self, host: str) -> Iterator[str]:
        """Return the URLs of the relays above a host, nearest first."""
        urls = (self._url(above) for above in self._tree.ancestors(host)[: MAX_SOURCES - 1])
        yield from (url for url in urls if url and host not in self._lied_to.get(url, ()))

    def _url(self, host: str) -> str:
        """Return the URL at which a host passes weights on, or ""."""
        urls = (
            peer.hello.weights_url for peer in self._members.get(host, {}).values() if peer.hello.passes_on
        )
        return next((url for url in urls if url and len(self._lied_to.get(url, ())) < LIED_TO), "")

    def _reads_in_place(self, host: str) -> bool:
        """Return whether a host seems to be the learner's, which has the files and fetches none."""
        learners = [peer.hello.host for peer in self._state.peers.of("learner")]
        there = self._members.get(host, {}).values()
        return any(
            peer.hello.host and not peer.hello.on_host and peer.hello.host in learners for peer in there
        )


def _host(peer: Peer) -> str:
    """Return what tells the hosts of generators apart: the name in their ticket, or else the name of the machine."""
    return host_of(peer) or peer.hello.host or peer.name
