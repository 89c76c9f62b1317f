"""Decides what hangs, what is silent, what may start again, and how long the learner of a run may take. Pure.

Callers pass the time and all findings.

The broker hears every peer's heartbeat, and its `/status` says how long each peer has been silent or without
progress. The kernel says whether a process is stopped, and how much processor time it has used. A silent
process that computes gets more time, because the machine may be slow, or a library may block the event loop.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from launch.servers import WEIGHTS
from launch.supervise.broker_status import Answer

GAP_S = 4.0
"""Gap between two looks, or two answers of the broker, after which all silence is counted anew."""
COMPUTING_SHARE = 0.1
"""Share of one core above which a silent process counts as computing."""
BROKER = "broker"
PEERS = ("learner", "generator", "actor")
"""Roles that join the broker. The weights server does not; it is judged by the kernel's findings alone."""
STALL_MARGIN_S = 1.0
"""Time added to a generator's own patience, so that the generator can act before the supervisor does."""
MIN_MISSES = 3
"""Requests in a row that the broker must leave unanswered before the length of its silence counts."""


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds; see `launch.run_file.sections.SupervisorSection`."""

    silence_s: float = 7.0
    computing_silence_s: float = 60.0
    start_s: float = 600.0
    learner_start_s: float = 600.0
    """Replaces ``start_s`` for the learner, which waits for its other hosts before it joins."""
    broker_start_s: float = 120.0
    generator_stall_s: float = 9.0
    learner_stall_s: float = 600.0


@dataclass(frozen=True)
class Vitals:
    """The kernel's findings about a process and its descendants."""

    stopped: int = 0
    """Pid of a process that is stopped; 0: none is stopped."""
    cpu_s: float = 0.0
    """Processor time used by the processes that are alive."""


@dataclass(frozen=True)
class Hung:
    """A process that has to be replaced, and why."""

    name: str
    why: str


@dataclass
class _Watched:
    started: float
    heard: float | None = None
    """Time at which the broker last heard the process; None until it has joined."""
    cpu_s: float = 0.0
    """Processor time that the process had used when it was last heard."""
    stopped_since: float | None = None


class Watchdog:
    """Judges the processes of a run, about once a second.

    Example:
        >>> dog = Watchdog(Limits())
        >>> dog.started("generator-0", 0.0)
        >>> heard = {"name": "generator-0", "silent_s": 0.2, "connected_s": 1.0, "busy": False, "stalled_s": 0.0}
        >>> dog.look({"peers": [heard]}, {}, 2.0)
        []
        >>> [dog.look({"peers": []}, {}, now) for now in (4.0, 6.0, 8.0)]  # the broker no longer lists it
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
        """Watch a process that has just started, without what was known of the previous one."""
        self._watched[name] = _Watched(started=now)
        if name == BROKER:
            self._answered, self._misses = None, 0

    def ended(self, name: str) -> None:
        """Stop watching a process that has ended."""
        self._watched.pop(name, None)

    def look(self, status: Mapping[str, Any] | None, vitals: Mapping[str, Vitals], now: float) -> list[Hung]:
        """Return the processes that hang.

        Args:
            status: the broker's answer; None: it did not answer.
            vitals: the kernel's findings, by name.
        """
        # The supervisor itself stood still, so the silence it sees may be its own.
        if self._looked is not None and now - self._looked > GAP_S:
            self._reset_all(now)
        self._looked = now
        hung = [*self._stopped(vitals, now)]
        if BROKER in self._watched:
            hung += self._broker(status is not None, vitals.get(BROKER, Vitals()), now)
        elif status is not None:
            # On a further host, the broker or the line to it may have been away.
            self._note_answer(now)
        if status is not None:
            hung += self._peers(status["peers"], vitals, now)
        return list({found.name: found for found in reversed(hung)}.values())

    def _reset_all(self, now: float) -> None:
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
            self._note_answer(now)
            watched.cpu_s = vitals.cpu_s
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

    def _note_answer(self, now: float) -> None:
        if self._answered is None or now - self._answered > GAP_S:
            self._reset_silence(now)
        self._answered, self._misses = now, 0

    def _reset_silence(self, now: float) -> None:
        """Count all silence anew, because peers must first join a broker that is back."""
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
            # An entry that joined before this process started belongs to the previous process of this name.
            if entry is not None and entry["connected_s"] <= now - watched.started:
                heard = now - entry["silent_s"]
                if watched.heard is None or heard > watched.heard:
                    watched.heard, watched.cpu_s = heard, cpu_s
                if why := self._stalled(name, entry):
                    yield Hung(name, why)
                    continue
            if watched.heard is None:
                if now - watched.started > self._start_s(name):
                    yield Hung(name, f"it has not joined the broker in {now - watched.started:.0f} s")
                continue
            silent = now - watched.heard
            if silent >= self._allowed(cpu_s - watched.cpu_s, silent):
                yield Hung(name, f"the broker has not heard it for {silent:.1f} s")

    def _stalled(self, name: str, entry: Mapping[str, Any]) -> str:
        limit = {
            # A generator that has measured long steps asks for more time, and gets a second to end by itself.
            "generator": max(self._limits.generator_stall_s, entry.get("patience_s", 0.0) + STALL_MARGIN_S),
            # A checkpoint takes as long as its bytes take, on top of what a step may take.
            "learner": self._limits.learner_stall_s + entry.get("patience_s", 0.0),
        }.get(role_of(name))
        if limit is None or not entry["busy"] or entry["stalled_s"] < limit:
            return ""
        return f"it has had work without progress for {entry['stalled_s']:.1f} s"

    def _start_s(self, name: str) -> float:
        return self._limits.learner_start_s if role_of(name) == "learner" else self._limits.start_s

    def _allowed(self, cpu_s: float, silent_s: float) -> float:
        computes = cpu_s > COMPUTING_SHARE * silent_s
        return self._limits.computing_silence_s if computes else self._limits.silence_s


def role_of(name: str) -> str:
    """Return the role of a process under a supervisor from its name: what stands before the first dash.

    Example:
        >>> role_of("generator-12"), role_of("actor-gpu-7-0"), role_of("broker")
        ('generator', 'actor', 'broker')
    """
    return name.partition("-")[0]


class Silence(NamedTuple):
    """Verdict about a weights server that does not answer."""

    note: str = ""
    """Sentence for the user, once for each silence; "" if there is nothing to say."""
    hung: str = ""
    """Reason to kill the server; "" if it may go on."""


class WeightsHealth:
    """Judges the weights server by its answers.

    Args:
        named_s: seconds of silence after which it is named.
        killed_s: seconds of silence after which it hangs.

    Example:
        >>> health = WeightsHealth(named_s=5.0, killed_s=20.0)
        >>> health.look(Answer(10.0, None, "refused"), started=8.0)
        Silence(note='', hung='')
        >>> health.look(Answer(29.0, None, "refused"), started=8.0).hung
        'it has not answered for 21 s'
        >>> health.look(Answer(30.0, {}), started=8.0), health.look(Answer(34.0, None), started=8.0)
        (Silence(note='', hung=''), Silence(note='', hung=''))
    """

    def __init__(self, named_s: float, killed_s: float) -> None:
        self._named_s, self._killed_s = named_s, killed_s
        self._answered, self._named = float("-inf"), False

    def look(self, answer: Answer, started: float) -> Silence:
        """Return what is to be done after an answer, or after none.

        Args:
            started: monotonic time at which the server's process was started.
        """
        if answer.status is not None:
            self._answered, self._named = answer.at, False
            return Silence()
        silent_s = answer.at - max(self._answered, started)
        note = hung = ""
        if silent_s > self._named_s and not self._named:
            self._named = True
            note = (
                f"{WEIGHTS} has not answered for {silent_s:.0f} s: generators on other hosts get no versions from it "
                f"({answer.why})"
            )
        if silent_s > self._killed_s:
            hung = f"it has not answered for {silent_s:.0f} s"
        return Silence(note, hung)


FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0


@dataclass(frozen=True)
class Patience:
    """Limits of a row of restarts.

    Args:
        max_restarts: restarts in a row.
        settled_s: a process that has lived this long begins a new row.
    """

    max_restarts: int = 5
    settled_s: float = 60.0


@dataclass
class RestartBackoff:
    """The restarts of one role process.

    The first restart of a row comes at once, the second after `FIRST_DELAY_S`, and each further one after
    twice the previous delay, at most `LONGEST_DELAY_S`.

    Example:
        >>> row, patience = RestartBackoff(), Patience(max_restarts=3, settled_s=60.0)
        >>> [row.ended("killed", lived_s=2.0, now=now, patience=patience) for now in (10.0, 20.0, 30.0, 40.0)]
        [10.0, 21.0, 32.0, None]
        >>> RestartBackoff(in_row=3).ended("killed", lived_s=61.0, now=9.0, patience=patience)
        9.0
    """

    in_row: int = 0
    total: int = 0
    reasons: list[str] = field(default_factory=list)

    def ended(self, why: str, *, lived_s: float, now: float, patience: Patience) -> float | None:
        """Record that the process has ended, and why.

        Return when to start it again, or None if it must not.
        """
        if lived_s >= patience.settled_s:
            self.in_row = 0
        if self.in_row >= patience.max_restarts:
            return None
        delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self.in_row - 1)) if self.in_row else 0.0
        self.in_row += 1
        self.total += 1
        self.reasons.append(why)
        return now + delay


LEARNER_STOP_S = 60.0
LEARNER_EXIT_S = 60.0
SHORTEST_MINUTES = 0.01
"""Least time limit, in minutes, of a learner that is started when the run's time is over."""


class LearnerTime:
    """The times of one run's learner, over all its starts.

    Args:
        max_minutes: time limit of the run.

    Example:
        >>> learner = LearnerTime(max_minutes=10.0)
        >>> learner.minutes_left(100.0), learner.minutes_left(160.0), learner.minutes_left(9e9)
        (10.0, 9.0, 0.01)
        >>> learner.exits_late(200.0), learner.exits_late(250.0), learner.exits_late(261.0)
        (False, False, True)
    """

    def __init__(self, max_minutes: float) -> None:
        self._max_minutes = max_minutes
        self._began: float | None = None
        self._result_seen: float | None = None
        self.exit_s = LEARNER_EXIT_S
        """Longest time between the learner's result and the end of its process."""
        self.stop_s = LEARNER_STOP_S
        """Longest time that the learner may take to end: longer if it has written a large checkpoint."""

    def started(self) -> None:
        """Forget the result of an earlier start."""
        self._result_seen = None

    def minutes_left(self, now: float) -> float:
        """Return the rest of the run's time limit: a restarted learner does not get all of it again."""
        if self._began is None:
            self._began = now
        return max(SHORTEST_MINUTES, self._max_minutes - (now - self._began) / 60)

    def heard(self, peer: Mapping[str, Any]) -> None:
        """Take the learner's entry in the broker's answer, with the patience that it asks for."""
        self.stop_s = max(self.stop_s, LEARNER_STOP_S + peer.get("patience_s", 0.0))

    def exits_late(self, now: float) -> bool:
        """Return whether the learner's result, which is there, was first seen more than ``exit_s`` ago."""
        if self._result_seen is None:
            self._result_seen = now
            return False
        return now - self._result_seen > self.exit_s
