"""The hosts of a run beside the learner's: who is there since when, what they give, what was lost with them. Pure.

A host is known by the peers that name it in their Hello. It is there while one of them is.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from broker.core.peers import Peer
from protocol.wanted import of_host

NAMED = 32
"""Hosts that have gauges of their own, in the order of joining; the rest is summed up as "others"."""
OTHERS = "others"
MAX_DIED = 1_000


def host_of(peer: Peer) -> str:
    """Return the host that a peer names, or "". A name that is not of that host counts for nothing."""
    host = peer.hello.on_host
    return host if host and of_host(peer.name, host) else ""


class Hosts:
    """Hosts by name, and what was counted of them since the broker started."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        """Time at which each host has joined, in the order of joining."""
        self._peers: dict[str, set[str]] = {}
        self._joined = self._lost = self._leases_lost = 0

    def joined(self, peer: Peer, now: float) -> None:
        """Note that a peer has joined."""
        if host := host_of(peer):
            if host not in self._since:
                self._since[host] = now
                self._joined += 1
            self._peers.setdefault(host, set()).add(peer.name)

    def left(self, peer: Peer, *, fault: bool, leases: int) -> None:
        """Note that a peer has gone.

        Args:
            fault: it was lost, and did not say Goodbye.
            leases: tasks that it held.
        """
        host = host_of(peer)
        if not host:
            return
        self._leases_lost += leases if fault else 0
        there = self._peers.get(host, set())
        there.discard(peer.name)
        if not there and host in self._since:
            del self._since[host]
            self._peers.pop(host, None)
            self._lost += fault

    def gauges(self, peers: Iterable[Peer], newest: int) -> dict[str, float]:
        """Return the gauges of hosts, as `broker.status.HOSTS` declares them, and of single hosts.

        Args:
            newest: newest policy version.
        """
        found = {
            "hosts/count": float(len(self._since)),
            "hosts/joined_total": float(self._joined),
            "hosts/lost_total": float(self._lost),
            "hosts/leases_lost_total": float(self._leases_lost),
        }
        if not self._since:
            return found
        for number, (host, members) in enumerate(self._by_host(peers)):
            name = host if number < NAMED else OTHERS
            tokens = f"hosts/tokens_per_second/{name}"
            found[tokens] = found.get(tokens, 0.0) + tokens_per_second(members)
            if (behind := lag(members, newest)) is not None:
                at = f"hosts/policy_lag/{name}"
                found[at] = max(found.get(at, 0.0), float(behind))
        return found

    def page(self, peers: Iterable[Peer], newest: int, now: float) -> list[dict[str, Any]]:
        """Return what `/status` says of each host."""
        return [
            {
                "name": host,
                "job": next((peer.hello.job for peer in members if peer.hello.job), ""),
                "generators": sum(peer.role == "generator" for peer in members),
                "actors": sum(peer.role == "actor" for peer in members),
                "tokens_per_second": round(tokens_per_second(members), 1),
                "policy_lag": lag(members, newest),
                "joined_s": round(now - self._since[host], 1),
                "restarts": sum(peer.hello.restarts for peer in members),
                "died": _last_death(members),
            }
            for host, members in self._by_host(peers)
        ]

    def _by_host(self, peers: Iterable[Peer]) -> Iterator[tuple[str, list[Peer]]]:
        members: dict[str, list[Peer]] = {host: [] for host in self._since}
        for peer in peers:
            host = host_of(peer)
            if host in members:
                members[host].append(peer)
        yield from members.items()


def tokens_per_second(members: Iterable[Peer]) -> float:
    """Return the tokens that these generators sample in a second now."""
    return sum(
        peer.heartbeat.gauges.get("tokens_per_second", 0.0) for peer in members if peer.role == "generator"
    )


def lag(members: Iterable[Peer], newest: int) -> int | None:
    """Return how far the last of these generators is behind the newest version; None if none has told its own."""
    heard = [peer for peer in members if peer.role == "generator" and peer.has_beaten]
    versions = [peer.heartbeat.policy_version for peer in heard]
    return max(0, newest - min(versions)) if versions else None


def _last_death(members: Iterable[Peer]) -> str:
    died = [peer for peer in members if peer.hello.died]
    return max(died, key=lambda peer: peer.joined).hello.died[:MAX_DIED] if died else ""
