"""Simulates a run on a virtual clock and measures it. Pure, seeded, deterministic; no waiting, no threads.

The simulation follows the rules of the system:

- The learner keeps ``(max_policy_lag + 1) * batch`` trajectories under way (`learner.curriculum`), or as few as keep it
  fed (`learner.under_way`).
- It trains the oldest groups first, drops groups without a token within the lag bound, and masks older tokens
  in others.
- It hands out new tasks while it waits and after each step, not during a step.
- Actors take tasks in turn. An episode stays with its generator. A generator pauses for each version.
- In lockstep no token is sampled before the version of its step is in service.

docs/run/capacity.md says what is left out.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from launch.errors import ConfigError, Stuck
from launch.plan.parts import (
    Setting,
    SimulatedActors,
    SimulatedEpisode,
    SimulatedGenerator,
    SimulatedLedger,
    SimulatedUnit,
    SimulatedWork,
    VirtualClock,
    between,
    draw_unit,
)
from launch.plan.rates import MeasuredRates
from launch.run_file.sections import RunConfig
from learner.under_way import UnderWay


class Simulation:
    """One simulated run."""

    def __init__(self, rates: MeasuredRates, setting: Setting) -> None:
        self._rates, self._setting = rates, setting
        self._clock, self.version = VirtualClock(), 0
        self.ledger = SimulatedLedger()
        self._between = between(rates, setting)
        self.generators: list[SimulatedGenerator] = []
        self.expected = 0.0
        """Time at which all generators and actors have joined."""
        self._next_group = self._next_actor = 0
        self._outstanding: dict[int, SimulatedUnit] = {}
        self._tasks: deque[SimulatedEpisode] = deque()
        self._actors = SimulatedActors(setting.concurrent_episodes)
        self._homeless: list[SimulatedEpisode] = []
        self._arrived: deque[SimulatedUnit] = deque()
        self._ready: list[SimulatedUnit] = []
        self._training: list[SimulatedUnit] = []
        self._work = SimulatedWork()
        """The learner's work."""
        self._waiting_since = self._update_began = self._step_began = self._busy_s = 0.0
        self.told: tuple[int, float, float] | None = None
        """Trained tokens, and seconds at work and idle, that the learner told after its last step."""
        self._under_way = UnderWay(setting.batch_groups) if setting.needed and not setting.sync else None
        self._slow = 1.0
        self._at_work = 0
        """Generators with a request under way."""
        self._here = 0
        """Generators that are there."""
        self._chance = random.Random(f"{setting.seed}/leaving")
        self.starting = 0
        """Generators and actors that have not joined yet."""
        self._start()

    # --- the clock ----------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Run until this many learner steps are done.

        Raises:
            Stuck: no event is left before the last step.
        """
        while self.ledger.steps < steps:
            if not self._clock.step():
                raise Stuck(f"nothing is left to happen at step {self.ledger.steps} of {steps}")

    @property
    def now(self) -> float:
        """Time since the start, in seconds."""
        return self._clock.now

    def run_until(self, seconds: float) -> None:
        """Run until this time.

        Raises:
            Stuck: no event is left before it.
        """
        while self.now < seconds:
            if not self._clock.step():
                raise Stuck(f"nothing is left to happen after {self.now:g} of {seconds:g} s")

    def every(self, seconds: float, look: Callable[[], None]) -> None:
        """Call a function again and again, as long as the simulation runs."""

        def happen() -> None:
            look()
            self._clock.schedule(self.now + seconds, happen)

        self._clock.schedule(self.now + seconds, happen)

    def _start(self) -> None:
        setting, rates = self._setting, self._rates
        for n in range(setting.generators):
            self._start_generator(n * setting.join_every_s)
        for n in range(setting.actors):
            self._start_actor(n * setting.join_every_s)
        self.expected = self._clock.last
        if rates.leaving.storm_seconds:
            self._plan_storm()
        self._try_step()

    # --- who comes and goes -------------------------------------------------------------------------------

    @property
    def serving(self) -> list[SimulatedGenerator]:
        """Generators that are there."""
        return [generator for generator in self.generators if not generator.gone]

    @property
    def actors(self) -> int:
        """Number of actors that have joined."""
        return self._actors.count

    @property
    def tasks_waiting(self) -> bool:
        """Whether a task waits for an actor."""
        return bool(self._tasks)

    @property
    def fetching(self) -> bool:
        """Whether a generator does not serve the newest version yet."""
        return any(generator.version < self.version for generator in self.serving)

    def grow(self, generators: int = 0, actors: int = 0) -> None:
        """Start further generators and actors now."""
        for _ in range(generators):
            self._start_generator(0.0)
        for _ in range(actors):
            self._start_actor(0.0)

    def shrink(self, generators: int) -> None:
        """Let the youngest generators leave now, but not the last one."""
        for generator in self.serving[1:][::-1][:generators]:
            self._leave(generator)

    def _start_generator(self, wait_s: float) -> None:
        self.starting += 1
        rates = self._rates.generator
        seconds = rates.start_seconds + rates.fetch_seconds
        self._clock.schedule(self.now + seconds + wait_s, self._generator_joins)

    def _start_actor(self, wait_s: float) -> None:
        self.starting += 1
        number = self._next_actor
        self._next_actor += 1
        at = self.now + self._rates.actor.start_seconds + wait_s
        self._clock.schedule(at, partial(self._actor_joins, number))

    def _leave(self, generator: SimulatedGenerator) -> None:
        """Take a generator away. Its turns go on elsewhere with the tokens that they have."""
        if generator.gone:
            return
        number = self.generators.index(generator)
        self._at_work -= generator.active
        self._here -= 1
        left = generator.leave(self.now)
        self._actors.remove_generator(number)
        for episode in left:
            episode.generator = -1
            self._ask(episode)
        self._update_slowdown()

    def _lose(self, generator: SimulatedGenerator) -> None:
        if generator.gone:
            return
        self._leave(generator)
        self._start_generator(self._rates.leaving.back_seconds)

    def _plan_loss(self, generator: SimulatedGenerator) -> None:
        mean = self._rates.leaving.mean_seconds
        if mean:
            self._clock.schedule(
                self.now + self._chance.expovariate(1 / mean), partial(self._lose, generator)
            )

    def _plan_storm(self) -> None:
        at = self.now + self._chance.expovariate(1 / self._rates.leaving.storm_seconds)
        self._clock.schedule(at, self._storm)

    def _storm(self) -> None:
        serving = self.serving
        for generator in self._chance.sample(serving, round(len(serving) * self._rates.leaving.storm_share)):
            self._lose(generator)
        self._plan_storm()

    def _generator_joins(self) -> None:
        self.starting -= 1
        setting = self._setting
        generator = SimulatedGenerator(
            self._rates.generator,
            setting.max_num_seqs,
            recomputes=setting.recomputes,
            now=self.now,
            version=self.version,
            segment_tokens=setting.segment_tokens,
        )
        generator.slow = self._slow
        self.generators.append(generator)
        self._here += 1
        self._actors.add_generator()
        self._plan_loss(generator)
        homeless, self._homeless = self._homeless, []
        for episode in homeless:
            self._ask(episode)

    def _actor_joins(self, actor: int) -> None:
        self.starting -= 1
        self._actors.join(actor, len(self.generators))
        self._lease()

    # --- episodes -----------------------------------------------------------------------------------------

    def _lease(self) -> None:
        """Give tasks to actors in turn, as far as they have room."""
        while self._tasks and self._actors.room:
            episode = self._tasks.popleft()
            self._actors.take(episode)
            episode.taken = self.now
            self._ask(episode)

    def _ask(self, episode: SimulatedEpisode) -> None:
        """Ask for an episode's next turn, at once or when the first generator has joined."""
        if not self._here:
            self._homeless.append(episode)
            return
        if episode.generator >= 0 and self.generators[episode.generator].gone:
            # It left while the environment answered.
            episode.generator, episode.cached_at = -1, -1
        generator = self.generators[self._actors.ask(episode)]
        self._at_work -= generator.active
        generator.ask(episode, self.now)
        self._at_work += generator.active
        self._changed(generator)

    def _turns_end(self, generator: SimulatedGenerator, stamp: int) -> None:
        if stamp != generator.stamp:
            return
        self._at_work -= generator.active
        ended = generator.end(self.now)
        self._at_work += generator.active
        for episode in ended:
            self._actors.answered(episode)
            after = episode.turns[episode.turn].after_s
            episode.turn += 1
            last = episode.turn == len(episode.turns)
            self._clock.schedule(self.now + after, partial(self._finish if last else self._ask, episode))
        self._changed(generator)

    def _finish(self, episode: SimulatedEpisode) -> None:
        self._actors.finish(episode)
        group = episode.group
        group.out -= 1
        group.seconds = max(group.seconds, self.now - episode.taken)
        if not group.out:
            group.newest = max(version for e in group.episodes for version, _ in e.spans)
            self._arrived.append(group)
        self._lease()
        if not self._work.active:
            self._try_step()

    # --- generators and cores -----------------------------------------------------------------------------

    def _changed(self, generator: SimulatedGenerator) -> None:
        """Plan the generator's next end again, and all ends if the number of processes at work changed."""
        if not self._update_slowdown():
            self._plan(generator)

    def _plan(self, generator: SimulatedGenerator) -> None:
        when = generator.next_end()
        if when is not None:
            self._clock.schedule(when, lambda stamp=generator.stamp: self._turns_end(generator, stamp))  # type: ignore[misc]

    def _update_slowdown(self) -> bool:
        """Slow all processes at work down alike. Return whether the slowdown has changed."""
        if not self._setting.shared:
            return False
        at_work = round(self._at_work * self._setting.stands_for) + self._work.active
        slow = self._rates.sharing.slow(at_work)
        if slow == self._slow:
            return False
        self._work.progress(self.now, self._slow)
        self._slow = slow
        for generator in self.serving:
            generator.advance(self.now)
            generator.slow = slow
            generator.stamp += 1
            self._plan(generator)
        self._plan_work()
        return True

    def _announce(self) -> None:
        for generator in self.serving:
            if not generator.loading:
                self._fetch(generator)

    def _fetch(self, generator: SimulatedGenerator) -> None:
        generator.loading = True
        version = self.version
        rates = self._rates.generator
        seconds = rates.update_seconds + rates.fetch_seconds
        self._clock.schedule(self.now + seconds, lambda: self._load(generator, version))

    def _load(self, generator: SimulatedGenerator, version: int) -> None:
        if generator.gone:
            return
        self._at_work -= generator.active
        generator.load(version, self.now)
        self._at_work += generator.active
        generator.loading = False
        if version < self.version:
            self._clock.schedule(
                self.now + self._rates.generator.pause_seconds, lambda: self._fetch(generator)
            )
            generator.loading = True
        self._changed(generator)

    # --- the learner --------------------------------------------------------------------------------------

    def _try_step(self) -> None:
        """Take in what has arrived, hand out tasks, and begin a step if a batch is there.

        The learner waits meanwhile.
        """
        setting, ledger = self._setting, self.ledger
        while self._arrived:
            group = self._arrived.popleft()
            filtered = (
                random.Random(f"{setting.seed}/{group.index}").random() < self._rates.episode.filtered_groups
            )
            if self._under_way is not None:
                self._under_way.arrived(group.seconds, trained=not filtered)
            if filtered:
                self._conclude(group)
                ledger.filtered += group.tokens
            else:
                self._ready.append(group)
        oldest = self.version - setting.max_policy_lag
        for group in [g for g in self._ready if g.newest < oldest]:
            self._ready.remove(group)
            self._conclude(group)
            ledger.stale += group.tokens
        self._refill()
        batches = setting.max_policy_lag + 1 if setting.sync else 1
        if len(self._ready) < setting.batch_groups * batches:
            return
        if setting.sync:
            self._ready.sort(key=lambda group: group.index)
        self._training = self._ready[: setting.batch_groups]
        del self._ready[: setting.batch_groups]
        ledger.idle_s += self.now - self._waiting_since
        self._update_began = self.now
        tokens = ledger.train(self._training, self.version, oldest)
        learner = self._rates.learner
        update_s = learner.seconds_per_token * tokens * setting.stands_for
        seconds = learner.step_seconds + update_s + learner.publish_seconds
        self._begin(seconds, self._stepped)

    def _stepped(self) -> None:
        """End a step: publish, remove the batch, hand out tasks, and begin the work that follows a step."""
        self.ledger.steps += 1
        if self.ledger.steps % self._setting.publish_every == 0:
            self.version += 1
            self._announce()
        for group in self._training:
            self._conclude(group)
        self._training = []
        if self._under_way is not None:
            self._under_way.trained(self.now - self._update_began, self.now - self._step_began)
        self._step_began = self.now
        self._refill()
        self._begin(self._rates.learner.after_seconds, self._wait)

    def _wait(self) -> None:
        self._waiting_since = self.now
        if self.ledger.steps:
            self._busy_s += self.now - self._update_began
            self.told = (self.ledger.trained.total(), self._busy_s, self.ledger.idle_s)
        self._try_step()

    def _begin(self, seconds: float, then: Callable[[], None]) -> None:
        self._work.begin(seconds, then, self.now)
        if not self._update_slowdown():
            self._plan_work()

    def _plan_work(self) -> None:
        when = self._work.next_end(self.now, self._slow)
        if when is not None:
            stamp = self._work.stamp
            self._clock.schedule(when, lambda: self._work_done(stamp))

    def _work_done(self, stamp: int) -> None:
        if (then := self._work.end(stamp)) is not None:
            then()
            self._update_slowdown()

    def _conclude(self, group: SimulatedUnit) -> None:
        del self._outstanding[group.index]

    def _refill(self) -> None:
        """Make new tasks, as many as the lag bound allows, or as are needed."""
        setting = self._setting
        capacity = (setting.max_policy_lag + 1) * setting.batch_groups
        if self._under_way is not None:
            capacity = self._under_way.wanted(capacity)
        while len(self._outstanding) < capacity:
            min_version = self.version if setting.sync else 0
            group = draw_unit(self._next_group, self._rates.episode, setting, self._between, min_version)
            self._next_group += 1
            self._outstanding[group.index] = group
            self._tasks += group.episodes
        self._lease()

    @property
    def held_tokens(self) -> int:
        """Tokens sampled in turns that have ended, and neither trained nor dropped yet."""
        # The tokens of the batch in training were counted when its step began.
        counted = {id(group) for group in self._training}
        return sum(g.tokens for g in self._outstanding.values() if id(g) not in counted)


WARM_UP_STEPS = 5
LARGEST_WHOLE = 64
"""Most generators that are always simulated one by one."""
MOST_TURNS = 200_000
"""Most turns of a simulation of more generators: some five seconds of a processor."""


@dataclass(frozen=True)
class Prediction:
    """Results of a simulation, from the first step after the warm-up to the last step."""

    seconds: float
    steps_per_second: float
    trained_tokens_per_second: float
    sampled_tokens_per_second: float
    lag_mean_versions: float
    lag_p95_versions: int
    lag_max_versions: int
    stale_share: float
    """Tokens masked or dropped as too old, as a share of these and the trained tokens."""
    learner_idle_share: float
    generator_idle_share: float
    running_mean: float
    """Mean number of sequences under way in a generator."""
    first_step_seconds: float
    """Seconds from the start until the first step has ended."""
    segments_per_second: float
    """Segments that the broker stores."""
    brokers: int
    """Brokers that take these segments."""


def setting_of(config: RunConfig) -> Setting:
    """Return the setting that a run file describes.

    Raises:
        ConfigError: the run trains on windows, which are not simulated.
    """
    learner = config.learner
    if learner.train_on == "windows":
        raise ConfigError(
            "learner.train_on is 'windows': a plan knows whole trajectories only; plan with "
            "learner.train_on=trajectories, and expect a lower lag than it says"
        )
    if learner.family is not None:
        raise ConfigError(
            f'learner.family.kind is "{learner.family.kind}": a plan knows no groups that ask for further groups; plan '
            "without [learner.family], and expect fewer trained tokens than it says"
        )
    whole = learner.train_on == "groups"
    return Setting(
        generators=config.generator.count,
        actors=config.actor.count,
        concurrent_episodes=config.actor.concurrent_episodes,
        max_num_seqs=config.generator.max_num_seqs,
        sync=config.run.mode == "sync",
        members=learner.first_members if whole else 1,
        baselines=learner.first_members - learner.group_size if whole else 0,
        batch_groups=learner.units_per_batch,
        max_policy_lag=config.max_policy_lag,
        publish_every=learner.publish_every,
        needed=learner.under_way == "needed",
        recomputes=config.generator.kv_on_update_used == "recomputed",
        segment_tokens=config.actor.segment_tokens,
        seed=config.run.seed,
    )


def simulate(rates: MeasuredRates, setting: Setting) -> Prediction:
    """Simulate a setting past the warm-up, and measure it.

    The warm-up takes `WARM_UP_STEPS` plus the lag bound in steps, and lasts until all generators and actors
    have joined.
    """
    asked, setting = setting, sample_of(rates, setting)
    simulation = Simulation(rates, setting)
    simulation.run(1)
    first = simulation.now
    simulation.run(WARM_UP_STEPS + setting.max_policy_lag)
    while simulation.now < simulation.expected:
        simulation.run(simulation.ledger.steps + 1)
    before = _snapshot(simulation)
    simulation.run(simulation.ledger.steps + setting.steps)
    found = _outcome(setting, rates, before, _snapshot(simulation), first)
    return found if setting is asked else _of_all(found, setting, rates)


def sample_of(rates: MeasuredRates, setting: Setting) -> Setting:
    """Return a setting with fewer generators, actors and groups, each of which stands for as many alike.

    A thousand generators play tens of millions of turns. Where these are too many, generators, actors and the groups
    of a batch are divided by the same number, and the learner's time for a token is multiplied by it. Rates of the
    sample then differ from those of all by chance alone: a batch waits for the longest of fewer groups.

    Example:
        >>> from launch.plan.rates import check_rates
        >>> points = [{"sequences": 1, "tokens_per_second": 10}]
        >>> learner, episode = {"seconds_per_token": 1}, {"turn_tokens": 9}
        >>> rates = check_rates({"generator": {"decode": points}, "learner": learner, "episode": episode}, "a")
        >>> small = sample_of(rates, Setting(generators=1000, actors=2000, batch_groups=16_000, members=8))
        >>> small.generators, small.actors, small.batch_groups, round(small.stands_for, 1)
        (23, 46, 368, 43.5)
        >>> sample_of(rates, Setting(generators=64, batch_groups=10_000)).generators
        64
    """
    steps = WARM_UP_STEPS + setting.max_policy_lag + setting.steps
    turns = steps * setting.batch_groups * setting.members * rates.episode.turns.mean()
    least = -(-setting.generators // LARGEST_WHOLE)
    if setting.generators <= LARGEST_WHOLE or turns <= MOST_TURNS:
        return setting
    divisor = min(setting.batch_groups, max(least, math.ceil(turns / MOST_TURNS)), setting.generators)
    first = max(1, setting.generators // divisor)

    def wrong(generators: int) -> float:
        factor = setting.generators / generators
        parts = (setting.batch_groups / factor, setting.actors / factor)
        return sum(abs(max(1, round(part)) / part - 1) for part in parts)

    # Whole numbers have to be near the same ratio.
    generators = min(range(first, 2 * first + 1), key=wrong)
    factor = setting.generators / generators
    return replace(
        setting,
        generators=generators,
        actors=max(1, round(setting.actors / factor)),
        batch_groups=max(1, round(setting.batch_groups / factor)),
        join_every_s=setting.join_every_s * factor,
        stands_for=factor,
    )


def _of_all(found: Prediction, setting: Setting, rates: MeasuredRates) -> Prediction:
    """Return the prediction of all generators from that of a sample."""
    factor = setting.stands_for
    segments = found.segments_per_second * factor
    return replace(
        found,
        trained_tokens_per_second=found.trained_tokens_per_second * factor,
        sampled_tokens_per_second=found.sampled_tokens_per_second * factor,
        segments_per_second=segments,
        brokers=brokers_for(segments, rates),
    )


def brokers_for(segments_per_second: float, rates: MeasuredRates) -> int:
    """Return how many brokers take these segments."""
    return max(1, math.ceil(segments_per_second / rates.broker.segments_per_second))


@dataclass(frozen=True)
class _Snapshot:
    now: float
    steps: int
    trained: Counter[int]
    old: int
    learner_idle_s: float
    sampled: float
    idle_s: float
    served_s: float
    sequence_s: float
    segments: int


def _snapshot(simulation: Simulation) -> _Snapshot:
    ledger, generators = simulation.ledger, simulation.generators
    for generator in generators:
        generator.advance(simulation.now)
    return _Snapshot(
        simulation.now,
        ledger.steps,
        Counter(ledger.trained),
        ledger.masked + ledger.stale,
        ledger.idle_s,
        sum(g.sampled + g.in_flight for g in generators),
        sum(g.idle_s for g in generators),
        sum(g.served_s for g in generators),
        sum(g.sequence_s for g in generators),
        sum(g.segments for g in generators),
    )


def _outcome(
    setting: Setting, rates: MeasuredRates, before: _Snapshot, after: _Snapshot, first: float
) -> Prediction:
    seconds = max(1e-12, after.now - before.now)
    lags = after.trained - before.trained
    trained, old = sum(lags.values()), after.old - before.old
    served = max(1e-12, after.served_s - before.served_s)
    segments = (after.segments - before.segments) / seconds
    return Prediction(
        seconds=after.now - before.now,
        steps_per_second=(after.steps - before.steps) / seconds,
        trained_tokens_per_second=trained / seconds,
        sampled_tokens_per_second=(after.sampled - before.sampled) / seconds,
        lag_mean_versions=sum(lag * count for lag, count in lags.items()) / max(1, trained),
        lag_p95_versions=percentile(lags, 0.95),
        lag_max_versions=max(lags, default=0),
        stale_share=old / max(1, trained + old),
        learner_idle_share=share((after.learner_idle_s - before.learner_idle_s) / seconds),
        generator_idle_share=share((after.idle_s - before.idle_s) / served),
        running_mean=(after.sequence_s - before.sequence_s) / served,
        first_step_seconds=first,
        segments_per_second=segments,
        brokers=brokers_for(segments, rates),
    )


def percentile(counts: Counter[int], at: float) -> int:
    """Return the smallest value that at least the share ``at`` of all counted items does not exceed.

    Example:
        >>> percentile(Counter({0: 90, 1: 5, 4: 5}), 0.95), percentile(Counter(), 0.95)
        (1, 0)
    """
    below, total = 0, sum(counts.values())
    for value in sorted(counts):
        below += counts[value]
        if below >= at * total:
            return value
    return 0


def share(value: float) -> float:
    """Return the value limited to [0, 1], which cuts off rounding errors."""
    return min(1.0, max(0.0, value))
