"""Parts of a simulated run: its clock, generators, actors, episodes, units, and the ledger of tokens. Pure.

A generator is modelled as a fluid: with n sequences under way, each gets a token every ``step_seconds(n)``.
So one count of steps serves all sequences, and a turn ends when the count has grown by the turn's tokens.
Reading prompts and loading weights stop the count for a while (``debt``).
"""

import bisect
import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from launch.plan.rates import EpisodeRates, GeneratorRates, MeasuredRates


class VirtualClock:
    """Lets planned events happen in order of their times, and those of one time in the order they were planned.

    Example:
        >>> clock, happened = VirtualClock(), []
        >>> clock.schedule(2.0, lambda: happened.append(clock.now))
        >>> clock.schedule(1.0, lambda: happened.append(clock.now))
        >>> clock.last, clock.step(), clock.step(), clock.step(), happened
        (2.0, True, True, False, [1.0, 2.0])
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def schedule(self, when: float, happen: Callable[[], None]) -> None:
        """Plan an event; one in the past happens now."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), happen))

    def step(self) -> bool:
        """Go on to the next event. Return whether there was one."""
        if not self._events:
            return False
        self.now, _, happen = heapq.heappop(self._events)
        happen()
        return True

    @property
    def last(self) -> float:
        """Time of the last planned event."""
        return max(when for when, _, _ in self._events)


class SimulatedWork:
    """FIFO queue of jobs on shared cores, which plans its end again when the share changes.

    Example:
        >>> work = SimulatedWork()
        >>> work.begin(4.0, lambda: None, now=0.0)
        >>> work.next_end(now=0.0, slow=1.0), work.stamp
        (4.0, 1)
        >>> work.progress(now=1.0, slow=1.0)
        >>> work.next_end(now=1.0, slow=2.0), work.end(stamp=1) is None, work.end(stamp=2) is None
        (7.0, True, False)
    """

    def __init__(self) -> None:
        self._left_s, self._at = 0.0, 0.0
        self._then: Callable[[], None] | None = None
        self.stamp = 0
        """Number of the newest plan. An end that was planned before does not count."""

    @property
    def active(self) -> bool:
        return self._then is not None

    def begin(self, seconds: float, then: Callable[[], None], now: float) -> None:
        """Begin a work.

        Args:
            seconds: its length if alone on its cores.
            then: function to call at its end.
        """
        self._left_s, self._then, self._at = seconds, then, now

    def progress(self, now: float, slow: float) -> None:
        """Take off what was done since the last call, at this slowdown."""
        if self.active:
            self._left_s = max(0.0, self._left_s - (now - self._at) / slow)
            self._at = now

    def next_end(self, now: float, slow: float) -> float | None:
        """Return when the work will end at this slowdown, under a new stamp; None without one."""
        self.stamp += 1
        return now + self._left_s * slow if self.active else None

    def end(self, stamp: int) -> Callable[[], None] | None:
        """End the work. Return what follows; None if this end was planned again meanwhile."""
        if stamp != self.stamp:
            return None
        then, self._then = self._then, None
        return then


EPSILON = 1e-9
GOLDEN = 0.618033988749895
"""Golden ratio, by which numbers spread evenly, however many there are."""


@dataclass(frozen=True)
class Setting:
    """The system to simulate."""

    generators: int = 1
    actors: int = 1
    concurrent_episodes: int = 32
    max_num_seqs: int = 1_000_000
    sync: bool = False
    members: int = 1
    """Trajectories per group. The learner gets whole groups."""
    baselines: int = 0
    """Members of a group that are sampled and not trained: greedy ones, and those of a lane, right ones included."""
    batch_groups: int = 1
    max_policy_lag: int = 0
    """Lag bound in versions; in lockstep, the forced lag."""
    publish_every: int = 1
    needed: bool = False
    """True: only as much work is under way as keeps the learner fed, see `learner.under_way`."""
    recomputes: bool = True
    shared: bool = True
    """True: learner and generators share cores; see `SharingRates`."""
    join_every_s: float = 0.0
    """Seconds between two generators, or two actors, that join in turn; 0: all join at the start."""
    segment_tokens: int = 1_000_000
    """Largest number of sampled tokens in one segment."""
    stands_for: float = 1.0
    """Generators for which each simulated one stands, see `launch.plan.simulation.sample_of`."""
    steps: int = 60
    """Learner steps that are measured."""
    seed: int = 0


@dataclass(slots=True)
class SimulatedTurn:
    """One turn of an episode: tokens read, tokens sampled, seconds until the next turn may be asked for."""

    read: int
    sampled: int
    after_s: float


@dataclass(slots=True, eq=False)
class SimulatedEpisode:
    """One trajectory, drawn before it begins, so that a plan for other hardware has the same work."""

    group: "SimulatedUnit"
    turns: list[SimulatedTurn]
    min_version: int = 0
    trained: bool = True
    """False: the episode is one of `Setting.baselines`."""
    actor: int = -1
    generator: int = -1
    turn: int = 0
    context: int = 0
    cached_at: int = -1
    """Version with which its context was last computed."""
    taken: float = 0.0
    """Time at which an actor took its task."""
    begun: float = 0.0
    """Count of its generator's steps when the current turn began."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of a policy version and the number of tokens it sampled."""

    @property
    def tokens(self) -> int:
        """Tokens sampled in turns that have ended."""
        return sum(count for _, count in self.spans)


@dataclass(slots=True, eq=False)
class SimulatedUnit:
    """A unit that the learner gets whole: a rollout group, or one trajectory."""

    index: int
    episodes: list[SimulatedEpisode] = field(default_factory=list)
    out: int = 0
    """Episodes that have not ended."""
    seconds: float = 0.0
    """How long the longest of the episodes that have ended took in its actor."""
    newest: int = -1
    """Newest version that sampled a token of the unit, known once all its episodes have ended."""

    @property
    def tokens(self) -> int:
        return sum(episode.tokens for episode in self.episodes)


def between(rates: MeasuredRates, setting: Setting) -> float:
    """Return how long a turn waits in its actor's queue: less with fewer episodes than were measured."""
    measured = rates.measured.concurrent_episodes if rates.measured is not None else 0
    share = setting.concurrent_episodes / measured if measured else 1.0
    return rates.episode.between_seconds * min(1.0, share)


def draw_turns(rates: EpisodeRates, rng: random.Random, between: float) -> list[SimulatedTurn]:
    """Draw the turns of one episode. Each waits ``between`` seconds in addition to its tool."""
    turns = []
    for n in range(rates.turns.draw_count(rng, 1)):
        read = (rates.observation_tokens if n else rates.prompt_tokens).draw_count(rng, 0)
        sampled = rates.turn_tokens.draw_count(rng, 1)
        turns.append(SimulatedTurn(read, sampled, rates.tool_seconds.draw(rng) + between))
    return turns


def draw_unit(
    index: int, rates: EpisodeRates, setting: Setting, between: float, min_version: int
) -> SimulatedUnit:
    """Return a unit whose episodes follow from its index and the seed of the setting.

    Args:
        between: seconds that each turn waits in addition to its tool.
        min_version: oldest version that may sample the episodes.
    """
    unit = SimulatedUnit(index, out=setting.members)
    for member in range(setting.members):
        rng = random.Random(f"{setting.seed}/{index}/{member}")
        episode = SimulatedEpisode(unit, draw_turns(rates, rng, between))
        episode.min_version = min_version
        episode.trained = member < setting.members - setting.baselines
        unit.episodes.append(episode)
    return unit


class SimulatedGenerator:
    """One generator process.

    Args:
        room: largest number of sequences at a time; others wait.
        recomputes: contexts are computed again after each weight update.
        segment_tokens: largest number of sampled tokens in one segment.
    """

    def __init__(
        self,
        rates: GeneratorRates,
        room: int,
        *,
        recomputes: bool,
        now: float,
        version: int,
        segment_tokens: int = 1_000_000,
    ) -> None:
        self._rates, self._room, self._recomputes = rates, room, recomputes
        self._segment_tokens = segment_tokens
        self.version = version
        self.loading = False
        self.slow = 1.0
        self.stamp = 0
        """Counter of changes. An event that was planned before the last change is void."""
        self.idle_s = self.served_s = self.sequence_s = 0.0
        self.sampled = self.segments = 0
        self.gone = False
        self._at, self._count, self._debt = now, 0.0, 0.0
        self._switches: list[tuple[float, int]] = [(0.0, version)]
        self._running: list[tuple[float, int, SimulatedEpisode]] = []
        self._waiting: deque[SimulatedEpisode] = deque()
        self._held: list[SimulatedEpisode] = []
        self._order = 0
        self._steps: dict[int, float] = {}

    @property
    def active(self) -> bool:
        """Whether a request is under way."""
        return bool(self._running)

    @property
    def in_flight(self) -> float:
        """Tokens sampled in turns that have not ended."""
        return sum(max(0.0, self._count - episode.begun) for _, _, episode in self._running)

    def advance(self, now: float) -> None:
        """Let the time since the last call pass."""
        passed, self._at = now - self._at, now
        self.served_s += passed
        if not self._running:
            self.idle_s += passed
        self.sequence_s += passed * len(self._running)
        work = passed / self.slow
        paid = min(self._debt, work)
        self._debt -= paid
        if self._running:
            self._count += (work - paid) / self._step_s()

    def ask(self, episode: SimulatedEpisode, now: float) -> None:
        """Take a request for the next turn of an episode."""
        self.advance(now)
        if episode.min_version > self.version:
            self._held.append(episode)
        else:
            self._waiting.append(episode)
        self._fill()

    def end(self, now: float) -> list[SimulatedEpisode]:
        """Return the episodes whose turn has ended by now.

        The turn that ends first always counts as ended.
        """
        self.advance(now)
        if self._running:
            self._count = max(self._count, self._running[0][0])
        ended = []
        while self._running and self._running[0][0] <= self._count + EPSILON:
            episode = heapq.heappop(self._running)[2]
            sampled = episode.turns[episode.turn].sampled
            self._note(episode, sampled)
            self.segments += -(-sampled // self._segment_tokens)
            ended.append(episode)
        self._fill()
        return ended

    def leave(self, now: float) -> list[SimulatedEpisode]:
        """End. Return the episodes that go on elsewhere, each with the tokens of its turn that it has by now."""
        self.advance(now)
        for _, _, episode in self._running:
            turn = episode.turns[episode.turn]
            done = min(turn.sampled - 1, int(self._count - episode.begun + EPSILON))
            episode.turns[episode.turn] = SimulatedTurn(0, turn.sampled - done, turn.after_s)
            self._note(episode, done)
        left = [*(episode for _, _, episode in self._running), *self._waiting, *self._held]
        self._running, self._waiting, self._held = [], deque(), []
        for episode in left:
            episode.cached_at = -1
        self.gone = True
        self.stamp += 1
        return left

    def load(self, version: int, now: float) -> None:
        """Stop for new weights, and go on with them."""
        self.advance(now)
        self.version = version
        self._debt += self._rates.pause_seconds
        if self._recomputes:
            contexts = sum(e.context + self._count - e.begun for _, _, e in self._running)
            self._debt += self._read_s(contexts)
            for _, _, episode in self._running:
                episode.cached_at = version
        self._switches.append((self._count, version))
        held, self._held = self._held, []
        for episode in held:
            (self._held if episode.min_version > version else self._waiting).append(episode)
        self._fill()

    def next_end(self) -> float | None:
        """Return when the next turn ends if nothing changes before; None if no turn is under way."""
        if not self._running:
            return None
        left = max(0.0, self._running[0][0] - self._count) * self._step_s()
        return self._at + (self._debt + left) * self.slow

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._room:
            episode = self._waiting.popleft()
            turn = episode.turns[episode.turn]
            fresh = episode.cached_at < 0 or (self._recomputes and episode.cached_at != self.version)
            self._debt += self._rates.turn_seconds + self._read_s(
                turn.read + (episode.context if fresh else 0)
            )
            episode.context += turn.read
            episode.cached_at, episode.begun = self.version, self._count
            self._order += 1
            heapq.heappush(self._running, (self._count + turn.sampled, self._order, episode))
        self.stamp += 1

    def _note(self, episode: SimulatedEpisode, sampled: int) -> None:
        """Record how many tokens of the turn that ends here each version sampled."""
        first = bisect.bisect_right(self._switches, (episode.begun, 1 << 60)) - 1
        given = 0
        for (_, version), after in zip(
            self._switches[first:], [*self._switches[first + 1 :], None], strict=True
        ):
            until = sampled if after is None else min(sampled, int(after[0] - episode.begun + EPSILON))
            if until > given:
                episode.spans.append((version, until - given))
                given = until
        self.sampled += sampled
        episode.context += sampled

    def _read_s(self, tokens: float) -> float:
        rate = self._rates.prompt_tokens_per_second
        return tokens / rate if rate else 0.0

    def _step_s(self) -> float:
        sequences = len(self._running)
        seconds = self._steps.get(sequences)
        if seconds is None:
            seconds = self._steps[sequences] = self._rates.step_seconds(sequences)
        return seconds


class SimulatedActors:
    """Room of each actor for episodes, and its requests at each generator.

    Args:
        episodes: episodes that each actor runs at a time.
    """

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes
        self._free: dict[int, int] = {}
        """Free episodes of each actor that has room. The first actor gets the next task."""
        self._streams: dict[int, list[float]] = {}
        self._gone: set[int] = set()

    @property
    def room(self) -> bool:
        """Whether an actor can take another task."""
        return bool(self._free)

    @property
    def count(self) -> int:
        """Number of actors that have joined."""
        return len(self._streams)

    def join(self, actor: int, generators: int) -> None:
        """Add an actor that knows so many generators."""
        self._free[actor] = self._episodes
        self._streams[actor] = [math.inf if number in self._gone else 0 for number in range(generators)]

    def add_generator(self) -> None:
        """Make one more generator known to all actors."""
        for streams in self._streams.values():
            streams.append(0)

    def remove_generator(self, generator: int) -> None:
        """Let no actor use a generator any more."""
        self._gone.add(generator)
        for streams in self._streams.values():
            streams[generator] = math.inf

    def take(self, episode: SimulatedEpisode) -> None:
        """Give an episode to the actor whose turn it is."""
        actor = next(iter(self._free))
        room = self._free.pop(actor) - 1
        if room:
            self._free[actor] = room
        episode.actor = actor

    def ask(self, episode: SimulatedEpisode) -> int:
        """Return the generator of an episode's next turn; at first the one its actor has fewest requests at."""
        streams = self._streams[episode.actor]
        if episode.generator < 0:
            episode.generator = self._least(streams, episode.actor)
        streams[episode.generator] += 1
        return episode.generator

    def _least(self, streams: list[float], actor: int) -> int:
        """Return the generator with the fewest of an actor's requests.

        With more generators than episodes of an actor, actors begin at different ones, as in the real system.
        """
        least = min(streams)
        if self._episodes < len(streams):
            begin = int(actor * GOLDEN % 1 * len(streams))
            if least in streams[begin:]:
                return streams.index(least, begin)
        return streams.index(least)

    def answered(self, episode: SimulatedEpisode) -> None:
        """Take note that a turn has ended."""
        self._streams[episode.actor][episode.generator] -= 1

    def finish(self, episode: SimulatedEpisode) -> None:
        """Make room where an episode has ended."""
        self._free[episode.actor] = self._free.get(episode.actor, 0) + 1


@dataclass
class SimulatedLedger:
    """Action tokens by outcome, steps, and the learner's idle time."""

    trained: Counter[int] = field(default_factory=Counter)
    """Trained tokens by policy lag."""
    masked: int = 0
    stale: int = 0
    filtered: int = 0
    steps: int = 0
    idle_s: float = 0.0
    """Seconds that the learner waited for a batch."""

    def train(self, batch: Iterable[SimulatedUnit], version: int, oldest: int) -> int:
        """Count the tokens of a batch by outcome. Return how many are trained.

        Args:
            version: the learner's policy version.
            oldest: version below which tokens are masked.
        """
        trained = 0
        for episode in (e for group in batch for e in group.episodes):
            for sampled, count in episode.spans:
                if not episode.trained:
                    self.filtered += count
                elif sampled < oldest:
                    self.masked += count
                else:
                    self.trained[version - sampled] += count
                    trained += count
        return trained
