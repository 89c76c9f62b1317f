"""How many generators and actors a run needs, from what its broker has seen while their numbers did not change. Pure.

`offbeat status` shows the advice. With `fleet.auto` the supervisor of the head carries it out, and `offbeat plan`'s
simulator tests it.
"""

import math
from collections import deque
from dataclasses import dataclass, replace

from protocol.wanted import LARGEST

CHANGE_S = 60.0
"""Least time between two changes."""
LONGEST_TURNS = 5
"""Turns of direction after which the time between two changes grows no more: it is half an hour then."""
SETTLE_S = 20.0
"""Time after a change that is not measured: caches are cold, and work is still spread as before."""
MEASURED_S = 300.0
"""Time that a measurement covers if the numbers stay as they are; longer where steps are slow."""
LEAST_STEPS = 4
"""Least learner steps of a measurement."""
MANY_STEPS = 12
"""Steps after which the sampled tokens tell a lack of generators, before the learner has used up what waits for it."""
SHORT = 0.05
"""Idle share of the learner above which it lacks generators."""
SPARE = 0.02
"""Idle share of the learner below which it may have too many generators."""
IDLE = 0.05
"""Idle share of the generators above which they wait for requests."""
ALIKE = 0.03
"""Difference of rates that counts as none."""
OTHER_WORK = 0.25
"""Change of the learner's pace after which earlier measurements count no more."""
FEWER = 0.75
"""Part of the generators that is tried where the learner is never idle."""
POOR, GOOD = 0.2, 0.4
"""Gain of trained tokens over gain of generators, as logarithms: 1 if twice the generators train twice as much. Below
the first number the further generators leave, above the second one they come back."""


@dataclass(frozen=True)
class Look:
    """What the broker knows at one moment. Of the sums, only differences are used."""

    at: float
    """Monotonic time in seconds."""
    generators: int
    """Generators that are connected and were not asked to leave."""
    actors: int
    trained_tokens: float | None = None
    """Action tokens that the learner has trained for the first time; None: it has not told."""
    busy_s: float = 0.0
    """Seconds of its steps in which the learner worked."""
    idle_s: float = 0.0
    """Seconds of its steps in which the learner waited for a batch."""
    sampled_tokens: float = 0.0
    serving_s: float = 0.0
    """Seconds that all generators have served."""
    unused_s: float = 0.0
    """Seconds in which generators had no request."""
    kept_tokens: float = 0.0
    """Action tokens of stored segments that were trained."""
    dropped_tokens: float = 0.0
    """Action tokens of stored segments that had another end: filtered, too stale, lost."""
    tasks_waiting: bool = False
    """Whether tasks wait for an actor."""
    fetching: bool = False
    """Whether a generator does not serve the newest version yet."""


@dataclass(frozen=True)
class Measure:
    """What a number of generators and actors did over some learner steps."""

    actors: int
    steps: int
    pace: float
    """Trained tokens per second of a learner that is never idle."""
    dropped: float
    """Dropped tokens for each trained token."""
    learner_idle: float
    sampled: float
    """Tokens per second of all generators."""
    rate: float
    """Tokens per second of a generator that is never idle."""
    generator_idle: float
    tasks_waiting: float
    """Share of the time in which tasks waited for an actor."""

    @property
    def demand(self) -> float:
        """Tokens per second that keep the learner busy, those included that are dropped."""
        return self.pace * (1 + self.dropped)

    @property
    def needed(self) -> int:
        """Generators that keep the learner busy.

        Example:
            >>> Measure(2, 9, 1000.0, 0.2, 0.5, 600.0, 300.0, 0.0, 0.0).needed  # ceil(1000 * 1.2 / 300)
            4
        """
        return max(1, math.ceil(self.demand / self.rate * (1 - ALIKE)))

    @property
    def trained(self) -> float:
        """Trained tokens per second."""
        return self.pace * (1 - self.learner_idle)

    @property
    def short(self) -> bool:
        """Whether the learner gets fewer tokens than it could train."""
        lacks = self.sampled < self.demand * (1 - 2 * SHORT) and self.steps >= MANY_STEPS
        return self.learner_idle > SHORT or lacks


@dataclass(frozen=True)
class Counts:
    """Numbers of generators and actors."""

    generators: int
    actors: int


@dataclass(frozen=True)
class Bounds:
    """Least and largest numbers."""

    generators: tuple[int, int] = (1, LARGEST)
    actors: tuple[int, int] = (1, LARGEST)


EVERY_NUMBER = Bounds()


@dataclass(frozen=True)
class Advice:
    """What `wanted` says."""

    counts: Counts
    reason: str
    measured: bool = True
    """False: there are no figures, so the counts are those that were given."""


class Window:
    """The looks since the numbers last changed, and what earlier numbers did.

    Args:
        settle_steps: learner steps after a change that are measured only if the learner lacks tokens: what was sampled
            before is trained first. `max_policy_lag + 1` are enough.

    Example:
        >>> window = Window()
        >>> for s in range(0, 100, 10):
        ...     window.add(
        ...         Look(
        ...             at=s,
        ...             generators=2,
        ...             actors=2,
        ...             trained_tokens=500.0 * s,
        ...             busy_s=s / 2,
        ...             idle_s=s / 2,
        ...             sampled_tokens=600.0 * s,
        ...             serving_s=2.0 * s,
        ...             kept_tokens=500.0 * s,
        ...         )
        ...     )
        >>> window.measure.pace, window.measure.learner_idle, window.measure.rate
        (1000.0, 0.5, 300.0)
    """

    def __init__(self, settle_steps: int = 1) -> None:
        self._settle_steps = settle_steps
        self._counts = Counts(0, 0)
        """Numbers of which the measurement is."""
        self._ends: deque[Look] = deque(maxlen=1_000)
        """First look after the end of each learner step."""
        self._waiting = self._looks = self._forgotten = 0
        self.last: Look | None = None
        self.since = 0.0
        """Time of the last change of the numbers."""
        self.changed_at = -math.inf
        """Time at which an advice was last carried out."""
        self._rising: bool | None = None
        self._turns = 0
        """How often the number has risen after it fell, or fallen after it rose, with the same work."""
        self._pace = 0.0
        self.measure: Measure | None = None
        """What the present numbers do; None: not measured yet."""
        self.known: dict[int, Measure] = {}
        """The newest measurement of each number of generators."""

    def add(self, look: Look) -> None:
        """Take a look. Call it about once a second."""
        last, self.last = self.last, look
        if (
            last is None
            or apart(self._counts.generators, look.generators)
            or self._counts.actors != look.actors
        ):
            self._counts = Counts(look.generators, look.actors)
            self._restart(look.at)
        elif _fell(last, look):
            # A process was started again, and counts from 0.
            self._restart(self.since)
        if look.at - self.since < SETTLE_S or look.trained_tokens is None or not look.generators:
            return
        self._looks += 1
        self._waiting += look.tasks_waiting
        if self._ends and look.busy_s == self._ends[-1].busy_s:
            return
        self._ends.append(look)
        self._measure(look)

    def changed(self, before: Counts, after: Counts, at: float) -> None:
        """Take note that an advice is carried out. A change that takes back the one before it doubles `pause_s`."""
        if after.generators != before.generators:
            rising = after.generators > before.generators
            self._turns += self._rising is not None and rising != self._rising
            self._rising = rising
        self.changed_at = at
        self._restart(at)

    @property
    def pause_s(self) -> float:
        """Least time between two changes."""
        return CHANGE_S * 2.0 ** min(self._turns, LONGEST_TURNS)

    def _restart(self, since: float) -> None:
        self.since, self.measure = since, None
        self._ends.clear()
        self._waiting = self._looks = self._forgotten = 0

    def _measure(self, end: Look) -> None:
        if end.at - self.since < self.pause_s:
            return
        # The first of the ends stands in the middle of a step.
        settled = max(1, self._settle_steps + 1 - self._forgotten)
        if len(self._ends) > settled + LEAST_STEPS:
            found = self._between(settled)
            while len(self._ends) > MANY_STEPS + settled and end.at - self._ends[0].at > MEASURED_S:
                self._ends.popleft()
                self._forgotten += 1
        else:
            # What was sampled before the change is trained first, so the lack of tokens is even greater than it seems.
            found = self._between(1) if len(self._ends) > 1 + LEAST_STEPS else None
            found = found if found is not None and found.short else None
        self.measure = found
        if found is not None:
            if abs(found.pace / (self._pace or found.pace) - 1) > OTHER_WORK:
                self._turns, self._rising, self._pace = 0, None, 0.0
            self._pace = self._pace or found.pace
            self.known[self._counts.generators] = found

    def _between(self, first: int) -> Measure | None:
        """Return what happened from an end of a step to the newest one; None if somebody's figures are missing."""
        begin, end = self._ends[first], self._ends[-1]
        seconds, busy = end.at - begin.at, end.busy_s - begin.busy_s
        serving, unused = end.serving_s - begin.serving_s, end.unused_s - begin.unused_s
        idle, kept = end.idle_s - begin.idle_s, end.kept_tokens - begin.kept_tokens
        trained = (end.trained_tokens or 0.0) - (begin.trained_tokens or 0.0)
        sampled = end.sampled_tokens - begin.sampled_tokens
        if min(seconds, busy, trained, sampled, kept, serving - unused) <= 0:
            return None
        return Measure(
            actors=end.actors,
            steps=len(self._ends) - 1 - first,
            pace=trained / busy,
            dropped=max(0.0, end.dropped_tokens - begin.dropped_tokens) / kept,
            learner_idle=max(0.0, idle / (busy + idle)),
            sampled=sampled / seconds,
            rate=sampled / (serving - unused),
            generator_idle=min(1.0, max(0.0, unused / serving)),
            tasks_waiting=self._waiting / self._looks,
        )


def apart(one: int, other: int) -> bool:
    """Return whether two numbers of processes differ by more than a tenth. In large fleets some always come and go.

    Example:
        >>> apart(4, 5), apart(100, 105)
        (True, False)
    """
    return abs(one - other) > 0.1 * max(one, other)


def _fell(before: Look, after: Look) -> bool:
    sums = ("busy_s", "sampled_tokens", "serving_s", "kept_tokens", "dropped_tokens")
    return any(getattr(after, name) < getattr(before, name) for name in sums)


def wanted(window: Window, counts: Counts, bounds: Bounds) -> Advice:
    """Return the numbers of generators and actors that the run needs, and why.

    A learner that is never idle trains `pace` tokens per second, and `dropped` more are sampled for each of them. So
    ``ceil(pace * (1 + dropped) / rate)`` generators are needed, where `rate` is what a generator samples that is never
    idle. With few sequences for each, generators sample less, so the formula finds nothing too many. Where the learner
    is never idle, fewer are therefore tried, but not fewer than the formula gave when the learner did lack tokens. What
    brought nothing before is not tried again while the learner's demand stays alike.

    Args:
        window: what the broker has seen.
        counts: numbers that were wanted last.
        bounds: least and largest numbers.
    """
    inside = Counts(_within(counts.generators, bounds.generators), _within(counts.actors, bounds.actors))
    last = window.last
    if last is None or not last.generators or not last.actors or last.trained_tokens is None:
        return Advice(
            inside, "not measured: no generator, no actor or no learner has told its figures", False
        )
    if inside != counts:
        return Advice(inside, "the number is outside fleet.generators or fleet.actors")
    if apart(last.generators, counts.generators) or apart(last.actors, counts.actors):
        there = (
            f"{last.generators} of {counts.generators} generators, {last.actors} of {counts.actors} actors"
        )
        return Advice(counts, f"the last change is under way: {there} are here", window.measure is not None)
    now = window.measure
    if last.at - window.changed_at < window.pause_s:
        return Advice(counts, f"the last change is {last.at - window.changed_at:.0f} s old", now is not None)
    if now is None:
        text = f"not measured: it takes {window.pause_s:g} s and {LEAST_STEPS} learner steps without a change"
        return Advice(counts, text, False)
    if now.generator_idle > IDLE and now.tasks_waiting > 0.5 and counts.actors < bounds.actors[1]:
        more = _within(math.ceil(counts.actors * 1.25), bounds.actors)
        text = f"generators idle {now.generator_idle:.0%} of the time while tasks wait for an actor"
        return Advice(replace(counts, actors=more), text)
    target, reason = _generators(window, now, counts.generators)
    generators = _within(target, bounds.generators)
    if generators != target and generators == counts.generators:
        reason += f"; fleet.generators allows {bounds.generators[0]} to {bounds.generators[1]}"
    if generators < counts.generators and last.fetching:
        return Advice(counts, "none leaves while a version is fetched")
    return Advice(replace(counts, generators=generators), reason)


class Autoscaler:
    """Looks, asks `wanted`, and notes when the advice is followed.

    Args:
        settle_steps: see `Window`.
    """

    def __init__(self, bounds: Bounds, settle_steps: int) -> None:
        self._bounds = bounds
        self._window = Window(settle_steps)
        self._counts: Counts | None = None
        self._asked: Counts | None = None
        """Numbers that were advised, and are not reached yet."""
        self.advice: Advice | None = None
        """The newest advice; None before the first look."""

    def look(self, look: Look, counts: Counts) -> Advice:
        """Take a look, about once a second, and return the advice.

        Args:
            counts: numbers that are wanted now.
        """
        before, self._counts = self._counts, counts
        if before is not None and self._asked is not None and _follows(before, counts, self._asked):
            self._window.changed(before, counts, look.at)
        self._window.add(look)
        self.advice = wanted(self._window, counts, self._bounds)
        if self.advice.measured and self.advice.counts != counts:
            self._asked = self.advice.counts
        elif counts == self._asked:
            self._asked = None
        return self.advice


def _follows(before: Counts, now: Counts, asked: Counts) -> bool:
    """Return whether a number has moved to what was asked for, or on the way there: some may leave before others.

    Example:
        >>> _follows(Counts(3, 1), Counts(2, 1), Counts(1, 1)), _follows(Counts(3, 1), Counts(2, 1), Counts(4, 1))
        (True, False)
    """
    ways = (
        (before.generators, now.generators, asked.generators),
        (before.actors, now.actors, asked.actors),
    )
    return any(old < new <= end or old > new >= end for old, new, end in ways)


def _within(count: int, bounds: tuple[int, int]) -> int:
    return min(bounds[1], max(bounds[0], count))


def _gain(few: int, with_few: Measure, many: int, with_many: Measure) -> float:
    """Return how much further generators brought: 1 if trained tokens grew as the generators did, 0 if not at all."""
    return math.log(with_many.trained / with_few.trained) / math.log(many / few)


def _generators(window: Window, now: Measure, count: int) -> tuple[int, str]:
    """Return the number of generators, without bounds, and why."""
    known = {
        number: one
        for number, one in window.known.items()
        if number != count and one.actors == now.actors and abs(one.pace / now.pace - 1) <= OTHER_WORK
    }
    # With fewer generators each samples more, so what too few of them lacked is a lower bound.
    least = max(
        (max(one.needed, number + 1) for number, one in known.items() if one.short and number < count),
        default=1,
    )
    idle = f"the learner is idle {now.learner_idle:.0%} of the time"
    if now.short:
        below = max((number for number in known if number < count), default=None)
        above = min((number for number in known if number > count), default=None)
        if below is not None and _gain(below, known[below], count, now) < POOR:
            return below, f"{below} trained nearly as much; generators are not what the learner waits for"
        if above is not None and _gain(count, now, above, known[above]) < GOOD:
            return count, f"{idle}, but {above} generators trained hardly more"
        more = min(max(count + 1, now.needed), 2 * count)
        need = f"its pace needs {now.demand:,.0f} tokens/s, and a generator samples {now.rate:,.0f}"
        return more, f"{idle}; {need}"
    if now.learner_idle > SPARE:
        return count, f"{idle}, which is little"
    fewer = min(count, max(least, count // 2, min(now.needed, math.ceil(count * FEWER), count - 1)))
    if fewer < count:
        return fewer, f"the learner is never idle ({now.learner_idle:.0%}), so {fewer} may do"
    return count, f"{idle}, and fewer generators would not do"
