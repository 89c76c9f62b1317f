"""Test the advice on the number of generators in the loop with the simulator of `offbeat plan`."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.core.autoscaling import CHANGE_S, Bounds
from launch.plan.parts import Setting
from launch.plan.rates import check_rates
from launch.plan.simulation import simulate
from tests.property.effort import EFFORT
from tests.property.test_plan_properties import rates
from tests.simulated_fleet import FollowedAdvice

FEW = settings(max_examples=3 * EFFORT, deadline=None)
BOUNDS = Bounds((1, 12))
NEARLY = 0.97
"""Part of the most trained tokens per second that the best number of generators reaches."""
WORKLOADS = {
    "short answers": (
        rates(
            decode=((1, 60), (16, 700), (32, 1000)),
            start_seconds=20.0,
            update_seconds=0.3,
            pause_seconds=0.1,
            learner={"seconds_per_token": 4.6e-4, "step_seconds": 0.4},
            episode={"turn_tokens": {"log_normal": [60, 0.5]}, "prompt_tokens": 80, "filtered_groups": 0.2},
        ),
        {"actors": 8, "members": 4, "batch_groups": 16, "max_policy_lag": 4},
    ),
    "long answers, slow line": (
        rates(
            decode=((1, 90), (32, 2000), (64, 2600)),
            start_seconds=30.0,
            version_bytes=3e9,
            bytes_per_second=2e9,
            pause_seconds=0.4,
            learner={"seconds_per_token": 9e-5, "step_seconds": 1.0},
            episode={"turn_tokens": {"log_normal": [400, 0.4]}, "prompt_tokens": 200},
        ),
        {"actors": 8, "members": 4, "batch_groups": 16, "max_policy_lag": 6},
    ),
    "turns and tools": (
        rates(
            decode=((1, 90), (32, 1500), (64, 2000)),
            start_seconds=20.0,
            pause_seconds=0.2,
            learner={"seconds_per_token": 1.4e-4, "step_seconds": 0.5},
            episode={
                "turns": {"uniform": [2, 6]},
                "turn_tokens": {"log_normal": [120, 0.5]},
                "observation_tokens": 60,
                "prompt_tokens": 300,
                "tool_seconds": {"log_uniform": [0.2, 2.0]},
                "filtered_groups": 0.1,
            },
        ),
        {"actors": 8, "members": 4, "batch_groups": 16, "max_policy_lag": 6},
    ),
}


def setting(name, **more):
    return Setting(concurrent_episodes=64, shared=False, **{**WORKLOADS[name][1], **more})


@cache
def best(name):
    """Return the smallest number of generators that trains nearly as much as any other."""
    made = WORKLOADS[name][0]
    trained = {
        count: simulate(made, setting(name, generators=count, steps=25)).trained_tokens_per_second
        for count in range(1, BOUNDS.generators[1] + 1)
    }
    return min(count for count, tokens in trained.items() if tokens >= NEARLY * max(trained.values()))


@pytest.mark.parametrize("start", [1, 12])
@pytest.mark.parametrize("name", WORKLOADS)
def test_after_ten_minutes_the_number_is_at_most_one_off_the_best(name, start):
    fleet = FollowedAdvice(WORKLOADS[name][0], setting(name, generators=start), BOUNDS)
    fleet.simulation.run_until(600.0)
    assert abs(fleet.counts.generators - best(name)) <= 1, (fleet.changes, best(name))


def well_behaved(fleet, bounds):
    times = [at for at, _, _ in fleet.changes]
    numbers = [counts.generators for _, counts, _ in fleet.changes]
    assert all(bounds.generators[0] <= number <= bounds.generators[1] for number in numbers)
    assert all(b - a >= CHANGE_S for a, b in pairwise(times))
    # A turn back doubles the time to the next change, so half an hour has room for a few.
    assert fleet.turns() <= 5, fleet.changes


leaving = st.sampled_from(
    [
        {},
        {"mean_seconds": 400.0, "back_seconds": 20.0},
        {"storm_seconds": 200.0, "storm_share": 0.5, "back_seconds": 30.0},
    ]
)


@FEW
@given(
    st.sampled_from(sorted(WORKLOADS)),
    st.integers(1, 12),
    st.tuples(st.integers(1, 4), st.integers(4, 12)),
    leaving,
    st.integers(0, 9),
)
def test_bounds_are_kept_and_nothing_flaps_whoever_comes_and_goes(name, start, allowed, lost, seed):
    made = check_rates({**WORKLOADS[name][0].model_dump(exclude_none=True), "leaving": lost}, "test")
    bounds = Bounds(allowed)
    start = min(allowed[1], max(allowed[0], start))
    fleet = FollowedAdvice(made, setting(name, generators=start, seed=seed), bounds)
    fleet.simulation.run_until(1200.0)
    well_behaved(fleet, bounds)


def test_where_more_generators_bring_little_their_number_settles():
    # Few long trajectories are under way, so that the learner waits for the longest whatever samples them.
    made = rates(
        decode=((1, 50), (32, 1000)),
        start_seconds=5.0,
        learner={"seconds_per_token": 1e-5},
        episode={"turn_tokens": {"log_normal": [200, 1.0]}},
    )
    few = Setting(
        generators=2,
        actors=2,
        concurrent_episodes=16,
        members=4,
        batch_groups=2,
        max_policy_lag=1,
        shared=False,
    )
    fleet = FollowedAdvice(made, few, BOUNDS)
    fleet.simulation.run_until(1800.0)
    well_behaved(fleet, BOUNDS)
    numbers = [counts.generators for _, counts, _ in fleet.changes]
    assert max(numbers, default=2) <= 8
