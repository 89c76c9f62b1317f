"""Which process hangs: alive, but silent, stopped, or busy without progress. Pure: time and findings come in.

The broker hears every peer's heartbeat and tells in `/status` how long each has been silent or has stood still.
The kernel tells whether a process is stopped, and whether it uses the processor. Silence of a process that
computes is pardoned for longer: a slow machine, or a library that keeps the event loop to itself.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GAP_S = 4.0
"""After so long without an answer of the broker nobody is judged by what happened before."""
COMPUTING_SHARE = 0.1
"""Of one core: with more, a silent process computes."""
BROKER = "broker"
PEERS = ("learner", "generator", "actor")
"""Roles that join the broker; others (a server of environments) are only looked after by the kernel's word."""
MIN_MISSES = 3
"""Answers of the broker in a row that have to be missing before time counts."""


@dataclass(frozen=True)
class Limits:
    """Seconds; see `launch.run_file.sections.SupervisorSection`."""

    silence_s: float = 7.0
    computing_silence_s: float = 60.0
    start_s: float = 600.0
    broker_start_s: float = 120.0
    generator_stall_s: float = 9.0
    learner_stall_s: float = 600.0


@dataclass(frozen=True)
class Vitals:
    """What the kernel says of a process and its descendants."""

    stopped: int = 0
    """Pid of one that is stopped; 0: none is."""
    cpu_s: float = 0.0
    """Processor time used by those alive."""


@dataclass(frozen=True)
class Hung:
    """A process that has to be replaced, and why."""

    name: str
    why: str


@dataclass
class _Watched:
    started: float
    heard: float | None = None
    cpu_s: float = 0.0
    """When it was last heard."""
    stopped_since: float | None = None


class Watchdog:
    """Looks at a run once a second.

    Example:
        >>> dog = Watchdog(Limits())
        >>> dog.started("generator-0", 0.0)
        >>> heard = {"name": "generator-0", "silent_s": 0.2, "connected_s": 1.0, "busy": False, "stalled_s": 0.0}
        >>> dog.look({"peers": [heard]}, {}, 2.0)
        []
        >>> [dog.look({"peers": []}, {}, now) for now in (4.0, 6.0, 8.0)]  # the broker has given it up
        [[], [], []]
        >>> dog.look({"peers": []}, {}, 9.0)[0].why
        'the broker has not heard it for 7.2 s'
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._watched: dict[str, _Watched] = {}
        self._answered: float | None = None
        self._misses = 0
        self._looked: float | None = None

    def started(self, name: str, now: float) -> None:
        """A process begins; what was known of the one before it is forgotten."""
        self._watched[name] = _Watched(started=now)
        if name == BROKER:
            self._answered, self._misses = None, 0

    def ended(self, name: str) -> None:
        """There is no such process for now."""
        self._watched.pop(name, None)

    def look(self, status: Mapping[str, Any] | None, vitals: Mapping[str, Vitals], now: float) -> list[Hung]:
        """Judge all processes by the broker's ``status`` (None: it did not answer) and by the kernel's ``vitals``."""
        if self._looked is not None and now - self._looked > GAP_S:  # it was us who stood still
            self._pardon(now)
        self._looked = now
        hung = [*self._stopped(vitals, now)]
        if BROKER in self._watched:
            hung += self._broker(status is not None, vitals.get(BROKER, Vitals()), now)
        if status is not None:
            hung += self._peers(status["peers"], vitals, now)
        return list({found.name: found for found in reversed(hung)}.values())

    def _pardon(self, now: float) -> None:
        self._misses = 0
        for watched in self._watched.values():
            watched.stopped_since = None
            if watched.heard is not None:
                watched.heard = now
        if self._answered is not None:
            self._answered = now

    def _stopped(self, vitals: Mapping[str, Vitals], now: float) -> Iterable[Hung]:
        for name, watched in self._watched.items():
            pid = vitals.get(name, Vitals()).stopped
            if not pid:
                watched.stopped_since = None
            elif watched.stopped_since is None:
                watched.stopped_since = now
            elif now - watched.stopped_since >= self._limits.silence_s:
                yield Hung(
                    name, f"its process {pid} has been stopped for {now - watched.stopped_since:.1f} s"
                )

    def _broker(self, answers: bool, vitals: Vitals, now: float) -> Iterable[Hung]:
        watched = self._watched[BROKER]
        if answers:
            if self._answered is None or now - self._answered > GAP_S:
                self._forgive_silence(now)
            self._answered, self._misses, watched.cpu_s = now, 0, vitals.cpu_s
            return
        self._misses += 1
        if self._answered is None:
            if now - watched.started > self._limits.broker_start_s:
                yield Hung(
                    BROKER, f"/status has not answered since its start {now - watched.started:.0f} s ago"
                )
            return
        silent = now - self._answered
        if self._misses >= MIN_MISSES and silent >= self._allowed(vitals.cpu_s - watched.cpu_s, silent):
            yield Hung(BROKER, f"/status has not answered for {silent:.1f} s")

    def _forgive_silence(self, now: float) -> None:
        """A broker that is back has to be joined first."""
        for watched in self._watched.values():
            if watched.heard is not None:
                watched.heard = now

    def _peers(
        self, peers: Iterable[Mapping[str, Any]], vitals: Mapping[str, Vitals], now: float
    ) -> Iterable[Hung]:
        entries = {peer["name"]: peer for peer in peers}
        for name, watched in self._watched.items():
            if role_of(name) not in PEERS:
                continue
            entry = entries.get(name)
            cpu_s = vitals.get(name, Vitals()).cpu_s
            if entry is not None and entry["connected_s"] <= now - watched.started:  # not the one before it
                heard = now - entry["silent_s"]
                if watched.heard is None or heard > watched.heard:
                    watched.heard, watched.cpu_s = heard, cpu_s
                if why := self._stalled(name, entry):
                    yield Hung(name, why)
                    continue
            if watched.heard is None:
                if now - watched.started > self._limits.start_s:
                    yield Hung(name, f"it has not joined the broker in {now - watched.started:.0f} s")
                continue
            silent = now - watched.heard
            if silent >= self._allowed(cpu_s - watched.cpu_s, silent):
                yield Hung(name, f"the broker has not heard it for {silent:.1f} s")

    def _stalled(self, name: str, entry: Mapping[str, Any]) -> str:
        limit = {
            "generator": self._limits.generator_stall_s,
            "learner": self._limits.learner_stall_s,
        }.get(role_of(name))
        if limit is None or not entry["busy"] or entry["stalled_s"] < limit:
            return ""
        return f"it has had work without progress for {entry['stalled_s']:.1f} s"

    def _allowed(self, cpu_s: float, silent_s: float) -> float:
        computes = cpu_s > COMPUTING_SHARE * silent_s
        return self._limits.computing_silence_s if computes else self._limits.silence_s


def role_of(name: str) -> str:
    """Role of a process of `offbeat train` by its name.

    Example:
        >>> role_of("generator-12"), role_of("broker")
        ('generator', 'broker')
    """
    return name.rsplit("-", 1)[0] if name[-1:].isdigit() else name
