"""Test the simulation behind `offbeat plan`: nothing is lost, shares are valid, known limits are met."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.plan.parts import Setting
from launch.plan.rates import MeasuredRates, check_rates
from launch.plan.simulation import Simulation, simulate
from tests.property.effort import EFFORT

FEW = settings(max_examples=25 * EFFORT, deadline=None)


def rates(
    *, decode=((1, 100.0), (32, 800.0)), learner=None, episode=None, slowdown=1.0, **generator
) -> MeasuredRates:
    points = [{"sequences": n, "tokens_per_second": float(r)} for n, r in decode]
    return check_rates(
        {
            "generator": {"decode": points, **generator},
            "learner": {"seconds_per_token": 0.001, **(learner or {})},
            "episode": {"turn_tokens": 10, **(episode or {})},
            "sharing": {"slowdown": slowdown, "cores": 2},
        },
        "test",
    )


laws = st.one_of(
    st.integers(1, 30),
    st.tuples(st.integers(1, 10), st.integers(10, 40)).map(lambda b: {"uniform": list(b)}),
    st.lists(st.integers(1, 50), min_size=1, max_size=5).map(lambda v: {"values": v}),
    st.just({"log_normal": [12, 0.8]}),
)
waits = st.one_of(st.just(0.0), st.floats(0.01, 2.0), st.just({"log_uniform": [0.05, 1.0]}))
seconds = st.sampled_from([0.0, 0.003, 0.1])


@st.composite
def worlds(draw):
    world = rates(
        decode=sorted(
            draw(st.dictionaries(st.integers(1, 64), st.integers(20, 2000), min_size=1, max_size=4)).items()
        ),
        prompt_tokens_per_second=draw(st.sampled_from([0.0, 500.0])),
        update_seconds=draw(seconds),
        pause_seconds=draw(seconds),
        start_seconds=draw(seconds),
        learner={
            "step_seconds": draw(st.floats(0.01, 1.0)),
            "seconds_per_token": draw(st.sampled_from([0.0, 0.0005, 0.01])),
            "publish_seconds": draw(seconds),
            "after_seconds": draw(seconds),
        },
        episode={
            "turns": draw(st.one_of(st.integers(1, 4), st.just({"uniform": [1, 5]}))),
            "prompt_tokens": draw(st.integers(0, 40)),
            "turn_tokens": draw(laws),
            "observation_tokens": draw(st.integers(0, 10)),
            "tool_seconds": draw(waits),
            "filtered_groups": draw(st.sampled_from([0.0, 0.3])),
        },
        slowdown=draw(st.sampled_from([1.0, 1.5])),
    )
    members = draw(st.integers(1, 4))
    setting = Setting(
        generators=draw(st.integers(1, 3)),
        actors=draw(st.integers(1, 3)),
        concurrent_episodes=draw(st.integers(1, 12)),
        max_num_seqs=draw(st.sampled_from([1, 4, 100])),
        sync=draw(st.booleans()),
        members=members,
        baselines=draw(st.integers(0, members - 1)),
        batch_groups=draw(st.integers(1, 4)),
        max_policy_lag=draw(st.integers(0, 3)),
        publish_every=draw(st.integers(1, 2)),
        recomputes=draw(st.booleans()),
        shared=draw(st.booleans()),
        join_every_s=draw(seconds),
        steps=10,
        seed=draw(st.integers(0, 3)),
    )
    return world, setting


@FEW
@given(worlds())
def test_every_token_sampled_is_in_one_place(world):
    simulation = Simulation(*world)
    for steps in (1, 4, 9):
        simulation.run(steps)
        ledger = simulation.ledger
        gone = ledger.trained.total() + ledger.masked + ledger.stale + ledger.filtered
        assert sum(g.sampled for g in simulation.generators) == gone + simulation.held_tokens


@FEW
@given(worlds())
def test_shares_are_shares_and_the_lag_keeps_its_bound(world):
    made, setting = world
    outcome = simulate(made, setting)
    for share in (outcome.learner_idle_share, outcome.generator_idle_share, outcome.stale_share):
        assert 0 <= share <= 1
    assert 0 <= outcome.lag_mean_versions <= outcome.lag_max_versions <= setting.max_policy_lag
    assert outcome.lag_p95_versions <= outcome.lag_max_versions
    assert (
        outcome.running_mean <= min(setting.max_num_seqs, setting.actors * setting.concurrent_episodes) + 1e-9
    )
    assert outcome.seconds > 0


@FEW
@given(worlds())
def test_the_same_seed_gives_the_same_plan(world):
    assert simulate(*world) == simulate(*world)


@FEW
@given(worlds())
def test_lockstep_lags_by_what_is_forced(world):
    made, setting = world
    setting = replace(setting, sync=True, publish_every=1)
    outcome = simulate(made, setting)
    assert outcome.lag_mean_versions == outcome.lag_max_versions == setting.max_policy_lag
    assert outcome.stale_share == 0


@settings(max_examples=8 * EFFORT, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2), st.booleans())
def test_more_generators_never_lower_throughput_where_they_are_the_bottleneck(seed, lag, tools):
    made = rates(
        learner={"seconds_per_token": 1e-6},
        episode={"turn_tokens": {"uniform": [5, 30]}, "tool_seconds": 0.2 if tools else 0.0},
    )
    base = Setting(actors=2, concurrent_episodes=32, members=4, batch_groups=8, shared=False, steps=20)
    base = replace(base, max_policy_lag=lag, seed=seed)
    rate = [simulate(made, replace(base, generators=n)).trained_tokens_per_second for n in (1, 2, 4)]
    assert rate[1] > 0.97 * rate[0]
    assert rate[2] > 0.97 * rate[1]


def test_a_learner_that_is_the_bottleneck_does_one_step_per_step_time():
    made = rates(
        learner={"step_seconds": 2.0, "seconds_per_token": 0.01, "publish_seconds": 0.3, "after_seconds": 0.2}
    )
    outcome = simulate(made, Setting(concurrent_episodes=64, members=4, batch_groups=4, max_policy_lag=2))
    step = 2.0 + 0.01 * 160 + 0.3 + 0.2  # 16 trajectories of 10 tokens
    assert outcome.steps_per_second == pytest.approx(1 / step)
    assert outcome.trained_tokens_per_second == pytest.approx(160 / step)
    assert outcome.learner_idle_share == 0
    assert outcome.lag_p95_versions == 2
    assert outcome.generator_idle_share > 0.5


def test_a_generator_that_is_the_bottleneck_gives_its_rate():
    made = rates(decode=((32, 640.0),), learner={"seconds_per_token": 1e-7}, episode={"turn_tokens": 20})
    outcome = simulate(made, Setting(concurrent_episodes=32, members=1, batch_groups=8, max_policy_lag=15))
    assert outcome.trained_tokens_per_second == pytest.approx(640, rel=0.03)
    assert outcome.generator_idle_share == pytest.approx(0, abs=1e-6)
    assert outcome.running_mean == pytest.approx(32, rel=0.01)
    assert outcome.learner_idle_share > 0.99


def test_lockstep_takes_generation_and_update_one_after_the_other():
    made = rates(
        decode=((1, 10.0), (8, 80.0)),
        pause_seconds=0.25,
        learner={"step_seconds": 1.0, "seconds_per_token": 0.0, "publish_seconds": 0.5},
    )
    outcome = simulate(made, Setting(concurrent_episodes=8, members=8, sync=True))
    assert outcome.steps_per_second == pytest.approx(1 / (0.25 + 10 * 0.1 + 1.5))
    assert outcome.learner_idle_share == pytest.approx(1.25 / 2.75)


def test_tools_leave_a_generator_idle_when_too_few_episodes_run():
    made = rates(decode=((1, 10.0),), learner={"seconds_per_token": 0.0}, episode={"tool_seconds": 3.0})
    outcome = simulate(made, Setting(concurrent_episodes=1, max_policy_lag=4))
    assert outcome.trained_tokens_per_second == pytest.approx(10 / (1 + 3), rel=0.01)
    assert outcome.generator_idle_share == pytest.approx(0.75, rel=0.02)


def test_sharing_cores_slows_both_down_only_while_both_work():
    alone = rates(learner={"step_seconds": 0.2}, episode={"turn_tokens": 10})
    both = rates(learner={"step_seconds": 0.2}, episode={"turn_tokens": 10}, slowdown=2.0)
    setting = Setting(concurrent_episodes=32, members=4, batch_groups=4, max_policy_lag=3)
    assert simulate(both, setting).steps_per_second < 0.7 * simulate(alone, setting).steps_per_second
    lockstep = replace(setting, sync=True)
    assert simulate(both, lockstep) == simulate(alone, lockstep)
    assert simulate(both, replace(setting, shared=False)) == simulate(alone, setting)


def test_a_trajectory_that_sees_an_update_has_tokens_of_two_versions():
    made = rates(
        decode=((1, 10.0),),
        learner={"step_seconds": 3.0, "seconds_per_token": 0.0},
        episode={"turn_tokens": 60},
    )
    simulation = Simulation(made, Setting(concurrent_episodes=4, max_policy_lag=5))
    simulation.run(12)
    assert len(simulation.ledger.trained) > 2


def test_those_who_join_late_help_from_then_on():
    made = rates(learner={"seconds_per_token": 1e-6}, start_seconds=3.0)
    early = Setting(
        generators=2, actors=2, concurrent_episodes=32, members=4, batch_groups=16, max_policy_lag=1
    )
    late = replace(early, join_every_s=10.0, shared=False, steps=20)
    outcome, simulation = simulate(made, late), Simulation(made, late)
    assert outcome.first_step_seconds > 3.0
    assert simulation.expected == 13.0
    assert outcome.trained_tokens_per_second == pytest.approx(1600, rel=0.1)
    simulation.run(1)
    assert len(simulation.generators) == 1
