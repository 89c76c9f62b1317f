"""Which generators each actor uses in a large fleet: a stable subset, by rendezvous hashing. Pure.

Were every actor connected to every generator, a fleet of n and n would have n^2 connections. With subsets it has 64 n.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SIZE = 64
"""Generators of an actor, if there are so many. More only where few actors have to cover many generators."""
HOMES = 2
"""Actors that have a generator in any case, so that none is idle."""

Scores = NDArray[np.uint64]


def key_of(name: str) -> int:
    """Return 64 bits that stand for a name, the same in every process."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def scores(key: int, keys: Scores) -> Scores:
    """Return how well one name goes with each of others: 64 bits for each pair, as if drawn at random.

    The highest wins, so that a name that comes or goes changes no other pair (Thaler and Ravishankar, 1998: rendezvous
    hashing). The bits of the sum of two keys are mixed as in SplitMix64 (Steele, Lea and Flood, 2014).

    Args:
        key: key of the one name, see `key_of`.
        keys: keys of the others.
    """
    mixed = keys + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)


class Names:
    """Names of one kind, with their keys and hosts in the order of joining."""

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self.hosts: dict[str, str] = {}
        self._names: list[str] | None = None
        self._array: Scores = np.empty(0, np.uint64)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def key(self, name: str) -> int:
        return self._keys[name]

    def add(self, name: str, host: str) -> None:
        self._keys[name], self.hosts[name], self._names = key_of(name), host, None

    def remove(self, name: str) -> None:
        del self._keys[name], self.hosts[name]
        self._names = None

    def all(self) -> tuple[list[str], Scores]:
        """Return all names and their keys."""
        if self._names is None:
            self._names = list(self._keys)
            self._array = np.fromiter(self._keys.values(), np.uint64, len(self._keys))
        return self._names, self._array

    def best(self, key: int, count: int) -> list[str]:
        """Return the names that go best with a key, the best first."""
        names, keys = self.all()
        found = scores(key, keys)
        if count < len(names):
            places = np.argpartition(found, len(names) - count)[len(names) - count :]
        else:
            places = np.arange(len(names))
        order = places[np.argsort(found[places])[::-1]]
        return [names[i] for i in order]


@dataclass
class _Subset:
    chosen: tuple[str, ...] = ()
    """Generators of the actor: those of its host, those that have it as a home, and others, the best first."""
    homed: set[str] = field(default_factory=set)
    """Generators that have this actor as a home."""
    least: int = 0
    """Score of the last one that was chosen for its score alone; 0 if there is room for further ones."""


class Subsets:
    """The subset of every actor, kept up to date as actors and generators come and go.

    An actor's subset has all generators of its host, then those that have it as a home, then those with the highest
    scores, `SIZE` in all or as many as there are. Each generator has `HOMES` actors as homes: those with the highest
    scores. So a generator that comes or goes changes at most one entry of each subset: it takes the place of the one
    with the lowest score, or leaves its place to the next.

    Example:
        >>> subsets = Subsets()
        >>> for number in range(100):
        ...     subsets.add_generator(f"g{number}", host=f"h{number}")
        >>> for number in range(10):
        ...     subsets.add_actor(f"a{number}", host=f"h{number}")
        >>> sorted(subsets.take_changed()) == sorted(f"a{number}" for number in range(10))
        True
        >>> [len(subsets.of(f"a{number}")) for number in range(10)] == [64] * 10
        True
        >>> "g3" in subsets.of("a3")
        True
        >>> subsets.remove_generator("g3"); 0 < len(subsets.take_changed()) <= 10
        True
    """

    def __init__(self) -> None:
        self._generators, self._actors = Names(), Names()
        self._subsets: dict[str, _Subset] = {}
        self._homes: dict[str, list[str]] = {}
        """Homes of each generator, the best first."""
        self._worst: dict[str, int] = {}
        """Score of the last home of each generator; 0 if it has too few."""
        self._by_host: dict[str, set[str]] = {}
        """Generators of each host that is told."""
        self._stale: set[str] = set()
        """Actors whose subset has to be chosen anew."""
        self._changed: set[str] = set()

    def __contains__(self, generator: object) -> bool:
        return generator in self._generators

    def of(self, actor: str) -> tuple[str, ...]:
        """Return the generators of an actor."""
        if actor in self._stale:
            self._choose(actor)
        return self._subsets[actor].chosen

    def told(self, actor: str) -> None:
        """Note that an actor knows its subset."""
        self._changed.discard(actor)

    def take_changed(self) -> set[str]:
        """Return the actors whose subsets have changed since the last call."""
        for actor in list(self._stale):
            self._choose(actor)
        changed, self._changed = self._changed, set()
        return changed

    def add_generator(self, name: str, host: str) -> None:
        """Add a generator, and have it in the subsets that it belongs to."""
        self._generators.add(name, host)
        key = self._generators.key(name)
        if host:
            self._by_host.setdefault(host, set()).add(name)
        self._homes[name] = []
        self._rehome(name)
        actors, keys = self._actors.all()
        found = scores(key, keys)
        least = np.fromiter((self._subsets[actor].least for actor in actors), np.uint64, len(actors))
        self._stale.update(actors[i] for i in np.flatnonzero(found > least))
        if host:
            self._stale.update(actor for actor in actors if self._actors.hosts[actor] == host)

    def remove_generator(self, name: str) -> None:
        """Remove a generator from all subsets."""
        host = self._generators.hosts[name]
        self._generators.remove(name)
        if host:
            self._by_host[host].discard(name)
            if not self._by_host[host]:
                del self._by_host[host]
        del self._worst[name]
        for actor in self._homes.pop(name):
            self._subsets[actor].homed.discard(name)
        self._stale.update(actor for actor, subset in self._subsets.items() if name in subset.chosen)

    def add_actor(self, name: str, host: str) -> None:
        """Add an actor. It becomes a home of generators that go better with it than with a home of theirs."""
        self._actors.add(name, host)
        self._subsets[name] = _Subset()
        self._stale.add(name)
        generators, keys = self._generators.all()
        worst = np.fromiter((self._worst[generator] for generator in generators), np.uint64, len(generators))
        for i in np.flatnonzero(scores(self._actors.key(name), keys) >= worst):
            self._rehome(generators[i])

    def remove_actor(self, name: str) -> None:
        """Remove an actor. The generators that had it as a home get others."""
        self._actors.remove(name)
        self._stale.discard(name)
        self._changed.discard(name)
        for generator in self._subsets.pop(name).homed:
            self._homes[generator].remove(name)
            self._rehome(generator)

    def _score(self, actor: str, generator: str) -> int:
        key = np.array([self._generators.key(generator)], np.uint64)
        return int(scores(self._actors.key(actor), key)[0])

    def _rehome(self, generator: str) -> None:
        before = self._homes[generator]
        after = self._homes[generator] = self._actors.best(self._generators.key(generator), HOMES)
        self._worst[generator] = self._score(after[-1], generator) if len(after) == HOMES else 0
        for actor in set(before) - set(after):
            self._subsets[actor].homed.discard(generator)
            self._stale.add(actor)
        for actor in set(after) - set(before):
            self._subsets[actor].homed.add(generator)
            self._stale.add(actor)

    def _choose(self, actor: str) -> None:
        """Choose the subset of one actor anew."""
        self._stale.discard(actor)
        subset, host = self._subsets[actor], self._actors.hosts[actor]
        own = sorted(self._by_host.get(host, ()))[:SIZE]
        first = dict.fromkeys([*own, *sorted(subset.homed)])
        best = self._generators.best(self._actors.key(actor), SIZE)
        others = [name for name in best if name not in first][: max(0, SIZE - len(first))]
        chosen = (*first, *others)
        full = len(chosen) >= SIZE
        subset.least = self._score(actor, others[-1]) if full and others else (2**64 - 1 if full else 0)
        if chosen != subset.chosen:
            subset.chosen = chosen
            self._changed.add(actor)
