"""The connected peers: their liveness, progress and credit, the gauges they report, and what is sent to them. Pure."""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from broker.core.records import Ledger
from protocol.codec import MAX_HEADER_BYTES, AnyMessage, Buffer
from protocol.gauges import MAX_GAUGE_NAME, MAX_GAUGES, merge_of, tag
from protocol.messages.fields import Role
from protocol.messages.peers import GeneratorInfo, Heartbeat, Hello, Refused

MAX_PEERS = 4_096
INFO_BYTES = 128
"""Bytes reserved for one generator in a Generators message, besides its name and endpoint."""
MAX_NOTE = 1_000
MAX_TOTALS = 256
MAX_MERGED = 1_024
"""Upper limit of the gauge names of all peers together; one message can hold this number."""


@dataclass
class Peer:
    """One peer that has said Hello and has not been lost since."""

    hello: Hello
    joined: float
    heard: float
    progress_at: float
    """Time when progress last grew; while a peer has no work, the time of its last heartbeat."""
    grew_at: float
    """Time when progress last grew, whether the peer had work or not."""
    reminded_at: float
    """Time when a generator was last reminded of the newest weights, or said Hello."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    task_credit: int = 0
    delivery_credit: int = 0
    has_beaten: bool = False
    """True once a heartbeat of this process has come. Before it nobody knows what version a generator serves."""
    asked_to_leave: bool = False
    """True once this process was asked to end."""
    place: int = 0
    """Number of an actor among the connected actors, see `protocol.messages.peers.Welcome`."""

    @property
    def name(self) -> str:
        return self.hello.peer

    @property
    def role(self) -> Role:
        return self.hello.role

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """Note a heartbeat. Gauges beyond the limits, and values that are not finite, are left out."""
        self.has_beaten = True
        if heartbeat.progress != self.heartbeat.progress:
            self.grew_at = self.progress_at = now
        elif not heartbeat.busy:
            self.progress_at = now
        self.heartbeat = Heartbeat(
            progress=heartbeat.progress,
            busy=heartbeat.busy,
            policy_version=heartbeat.policy_version,
            patience_s=heartbeat.patience_s,
            note=heartbeat.note[:MAX_NOTE],
            complaints=heartbeat.complaints,
            gauges={
                name: value
                for name, value in list(heartbeat.gauges.items())[:MAX_GAUGES]
                if len(name) <= MAX_GAUGE_NAME and name.isascii() and math.isfinite(value)
            },
        )

    def stalled_for(self, now: float) -> float:
        """Return the seconds that the peer has had work without progress."""
        return now - self.progress_at

    def may_serve(self, now: float, stall_s: float) -> bool:
        """Return whether actors may use this generator: it has an endpoint and is not stalled with work.

        ``stall_s`` is the least time for which a generator may make no step; its own measure may be longer.
        """
        return bool(self.hello.endpoint) and self.stalled_for(now) < max(stall_s, self.heartbeat.patience_s)


class Places:
    """Numbers from 0 on: `take` returns the lowest one that is free.

    Example:
        >>> places = Places()
        >>> places.take_lowest(), places.take_lowest(), places.take_lowest()
        (0, 1, 2)
        >>> places.free(1); places.take_lowest(), places.take_lowest()
        (1, 3)
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0

    def take_lowest(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def free(self, place: int) -> None:
        heapq.heappush(self._free, place)


class Peers:
    """Registry of the connected peers."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}
        self._of: dict[Role, dict[str, Peer]] = {"learner": {}, "actor": {}, "generator": {}}
        """Peers by role."""
        self._places = Places()
        self._retired: dict[str, float] = {}
        self._gone: OrderedDict[tuple[str, int], dict[str, float]] = OrderedDict()
        """Totals of processes that are gone, by name and incarnation, in case one turns out to be alive. The names of
        the totals are those of its heartbeat."""
        self._newest: OrderedDict[str, int] = OrderedDict()
        """Incarnation of the newest process of each name, gone or not."""
        self.restarts: dict[Role, int] = {"learner": 0, "generator": 0, "actor": 0}
        """Processes that took the name of an earlier one, by role, since the broker began."""

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def get(self, name: str) -> Peer | None:
        return self._peers.get(name)

    def of(self, role: Role) -> list[Peer]:
        """Return the peers of one role, in the order of joining."""
        return list(self._of[role].values())

    def objection(self, name: str, hello: Hello) -> Refused | None:
        """Return the refusal that a peer of any role would get for this Hello, or None. Changes nothing."""
        known = self._peers.get(name)
        if hello.peer != name:
            text = f"the routing id is {name!r}, Hello says {hello.peer!r}; they must be equal"
            return Refused(code="bad_hello", message=text, fatal=True)
        if known is not None and hello.incarnation < known.hello.incarnation:
            text = f"a newer process of the name {name!r} has joined; names must be unique in a run"
            return Refused(code="stale_incarnation", message=text, fatal=True)
        if known is None and len(self._peers) >= MAX_PEERS:
            return Refused(
                code="too_many_peers", message=f"{MAX_PEERS} peers are connected, the limit; try again later"
            )
        return None

    def add(self, hello: Hello, now: float) -> Peer:
        """Register a peer without credit. The same process keeps its time of joining and its heartbeat."""
        known = self._peers.get(hello.peer)
        peer = Peer(hello, joined=now, heard=now, progress_at=now, grew_at=now, reminded_at=now)
        if known is not None and known.hello.incarnation == hello.incarnation:
            peer.joined, peer.heartbeat = known.joined, known.heartbeat
            peer.has_beaten = known.has_beaten
        if hello.role == "actor":
            is_here = known is not None and known.role == "actor"
            peer.place = known.place if known is not None and is_here else self._places.take_lowest()
        if known is not None and known.role != hello.role:
            del self._of[known.role][hello.peer]
        self._peers[hello.peer] = self._of[hello.role][hello.peer] = peer
        if totals := self._gone.pop((hello.peer, hello.incarnation), {}):
            for gauge, value in totals.items():
                self._retired[tag(hello.role, gauge)] -= value
            # Until its next heartbeat the process counts for what it counted for, so that no total falls.
            peer.heartbeat = Heartbeat(gauges=totals)
        self._count_start(hello)
        return peer

    def _count_start(self, hello: Hello) -> None:
        before = self._newest.pop(hello.peer, hello.incarnation)
        self.restarts[hello.role] += before != hello.incarnation
        self._newest[hello.peer] = hello.incarnation
        if len(self._newest) > MAX_PEERS:
            self._newest.popitem(last=False)

    def remove(self, name: str) -> None:
        """Remove a peer; its totals stay in the sums."""
        peer = self._peers.pop(name)
        del self._of[peer.role][name]
        if peer.role == "actor":
            self._places.free(peer.place)
        totals = {
            gauge: value
            for gauge, value in peer.heartbeat.gauges.items()
            if merge_of(peer.role, gauge) == "total"
        }
        known, role = self._retired, peer.role
        totals = {
            k: v for k, v in totals.items() if tag(role, k) in known or len(known) + len(totals) <= MAX_TOTALS
        }
        for gauge, value in totals.items():
            self._retired[tag(role, gauge)] = self._retired.get(tag(role, gauge), 0.0) + value
        self._gone[name, peer.hello.incarnation] = totals
        while len(self._gone) > MAX_PEERS:
            self._gone.popitem(last=False)

    def healthy_generators(self, now: float, stall_s: float) -> list[GeneratorInfo]:
        """Return the generators that actors may use, see `Peer.may_serve`."""
        return [
            GeneratorInfo(
                peer=peer.name,
                endpoint=peer.hello.endpoint,
                policy_version=peer.heartbeat.policy_version,
                public_key=peer.hello.public_key,
                evaluates=peer.hello.evaluates,
            )
            for peer in self.of("generator")
            if peer.may_serve(now, stall_s)
        ]

    def fitting(self, infos: list[GeneratorInfo]) -> list[GeneratorInfo]:
        """Return as many of these generators as one message to actors holds, from the first one on."""
        fit, room = list[GeneratorInfo](), MAX_HEADER_BYTES - INFO_BYTES
        for info in infos:
            room -= len(info.peer.encode()) + len(info.endpoint.encode()) + INFO_BYTES
            if room < 0:
                break
            fit.append(info)
        return fit

    def total(self, role: Role, gauge: str) -> float:
        """Return the sum of one counter over all peers of a role, those included that are gone."""
        here = (peer.heartbeat.gauges.get(gauge, 0.0) for peer in self.of(role))
        return self._retired.get(tag(role, gauge), 0.0) + sum(here)

    def gauges(self) -> dict[str, float]:
        """Return the gauges of generators and actors, merged by name as `protocol.gauges` says."""
        values: dict[str, list[float]] = {}
        means = set[str]()
        for peer in self._peers.values():
            if peer.role == "learner":
                continue
            for gauge, value in peer.heartbeat.gauges.items():
                name = tag(peer.role, gauge)
                if name in values or len(values) < MAX_MERGED:
                    values.setdefault(name, []).append(value)
                    if merge_of(peer.role, gauge) == "mean":
                        means.add(name)
        merged = dict(self._retired)
        for name, numbers in values.items():
            if name in means:
                merged[name] = sum(numbers) / len(numbers)
            else:
                merged[name] = merged.get(name, 0.0) + sum(numbers)
        return merged


class Send(Struct, frozen=True):
    """Action: send ``message`` to ``peer``. ``frames`` are the (header, body) pairs that follow a Deliver."""

    peer: str
    message: AnyMessage
    frames: Sequence[tuple[bytes, Buffer]] = ()


class BrokerOutbox:
    """Queue of actions, in the order in which the parts of the `Dispatcher` put them in."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._queue: list[Send] = []

    def send(self, peer: str, message: AnyMessage, frames: Sequence[tuple[bytes, Buffer]] = ()) -> None:
        """Queue a message to a peer."""
        self._queue.append(Send(peer, message, frames))

    def refuse(self, peer: str, code: str, text: str, *, fatal: bool = False) -> None:
        """Refuse a message of a peer, and count the refusal."""
        self._ledger.refuse(code)
        self.send(peer, Refused(code=code, message=text, fatal=fatal))

    def take_queued(self) -> list[Send]:
        """Return the actions queued since the last call."""
        queue, self._queue = self._queue, []
        return queue
