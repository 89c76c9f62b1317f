"""The list of generators as actors know it, and the time at which a new one is due. Pure."""

from msgspec.structs import replace

from broker.core.peers import INFO_BYTES, Peer, Peers
from protocol.messages.generators import GeneratorInfo

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
