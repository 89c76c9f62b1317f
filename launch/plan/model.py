"""Predicts what a setting would do: runs the simulation and measures it. Pure."""

from collections import Counter
from dataclasses import dataclass

from launch.errors import ConfigError
from launch.plan.parts import Setting
from launch.plan.rates import MeasuredRates
from launch.plan.simulation import Simulation
from launch.run_file.sections import RunConfig

WARM_UP_STEPS = 5


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
        members=learner.group_members if whole else 1,
        baselines=learner.group_members - learner.group_size if whole else 0,
        batch_groups=learner.units_per_batch,
        max_policy_lag=config.max_policy_lag,
        publish_every=learner.publish_every,
        recomputes=config.generator.kv_on_update_used == "recomputed",
        seed=config.run.seed,
    )


def simulate(rates: MeasuredRates, setting: Setting) -> Prediction:
    """Simulate a setting past the warm-up, and measure it.

    The warm-up takes `WARM_UP_STEPS` plus the lag bound in steps, and lasts until all generators and actors
    have joined.
    """
    simulation = Simulation(rates, setting)
    simulation.run(1)
    first = simulation.now
    simulation.run(WARM_UP_STEPS + setting.max_policy_lag)
    while simulation.now < simulation.expected:
        simulation.run(simulation.ledger.steps + 1)
    before = _snapshot(simulation)
    simulation.run(simulation.ledger.steps + setting.steps)
    return _outcome(setting, before, _snapshot(simulation), first)


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
    )


def _outcome(setting: Setting, before: _Snapshot, after: _Snapshot, first: float) -> Prediction:
    seconds = max(1e-12, after.now - before.now)
    lags = after.trained - before.trained
    trained, old = sum(lags.values()), after.old - before.old
    served = max(1e-12, after.served_s - before.served_s)
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
