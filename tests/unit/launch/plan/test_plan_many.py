"""Test the simulation behind `offbeat plan` where much is asked of it: many generators, losses, large versions."""

import time

import pytest

from launch.errors import ConfigError
from launch.plan import simulation
from launch.plan.command import crowds
from launch.plan.parts import Setting
from launch.plan.rates import check_rates
from launch.plan.simulation import Simulation, simulate
from tests.property.test_plan_properties import rates

WORLDS = {
    "plain": (
        {},
        {"generators": 2, "actors": 2, "concurrent_episodes": 8, "batch_groups": 8, "max_policy_lag": 1},
    ),
    "shared cores": (
        {"slowdown": 1.5, "pause_seconds": 0.05, "update_seconds": 0.1, "start_seconds": 0.4},
        {
            "generators": 3,
            "actors": 2,
            "concurrent_episodes": 12,
            "batch_groups": 4,
            "members": 4,
            "baselines": 1,
            "max_policy_lag": 2,
        },
    ),
    "tools, own cores": (
        {
            "prompt_tokens_per_second": 500.0,
            "episode": {
                "turns": {"uniform": [1, 5]},
                "turn_tokens": {"log_normal": [12, 0.8]},
                "observation_tokens": 4,
                "tool_seconds": {"log_uniform": [0.05, 1.0]},
                "filtered_groups": 0.3,
            },
        },
        {
            "generators": 3,
            "actors": 3,
            "concurrent_episodes": 6,
            "batch_groups": 2,
            "members": 4,
            "max_policy_lag": 3,
            "publish_every": 2,
            "shared": False,
            "join_every_s": 0.5,
        },
    ),
    "lockstep": (
        {"update_seconds": 0.02},
        {
            "generators": 2,
            "actors": 1,
            "concurrent_episodes": 12,
            "batch_groups": 3,
            "members": 2,
            "sync": True,
            "max_policy_lag": 1,
        },
    ),
    "needed": (
        {"learner": {"step_seconds": 0.5}},
        {
            "generators": 2,
            "actors": 2,
            "concurrent_episodes": 40,
            "batch_groups": 4,
            "members": 2,
            "needed": True,
            "max_policy_lag": 4,
            "recomputes": False,
        },
    ),
}
NAMES = (
    "steps_per_second",
    "trained_tokens_per_second",
    "sampled_tokens_per_second",
    "lag_mean_versions",
    "stale_share",
    "learner_idle_share",
    "generator_idle_share",
    "running_mean",
    "first_step_seconds",
)
FIGURES = {
    "plain": [
        6.584536958368735,
        526.7629566694987,
        526.7629566694989,
        0.8,
        0.0,
        0.209855564995752,
        2.436768179225422e-16,
        4.839422259983007,
        0.24774193548387097,
    ],
    "shared cores": [
        2.216739962100897,
        257.14183560370407,
        354.6783939361435,
        1.4310344827586208,
        0.03333333333333333,
        0.22857449318888792,
        0.0,
        7.999999999999998,
        1.0825806451612903,
    ],
    "tools, own cores": [
        0.7834283916262981,
        300.9670737831029,
        436.5037100335007,
        0.7334056399132322,
        0.0,
        0.699032926216897,
        0.13841878087268095,
        2.3768401532023398,
        3.8372957366517526,
    ],
    "lockstep": [
        5.016181229773464,
        300.9708737864078,
        300.9708737864078,
        1.0,
        0.0,
        0.6990291262135919,
        0.40129449838187753,
        1.796116504854368,
        0.20838709677419354,
    ],
    "needed": [
        1.5515515515515514,
        124.12412412412412,
        124.12412412412412,
        1.25,
        0.0,
        0.0,
        0.6996996996996999,
        1.2012012012011997,
        0.7477419354838709,
    ],
}
"""What the simulation found before it knew losses, versions by size, and samples: `NAMES` of each world."""


@pytest.mark.parametrize("name", WORLDS)
def test_old_results_stay_equal_where_nothing_new_is_asked(name):
    world, setting = WORLDS[name]
    outcome = simulate(rates(**world), Setting(**setting, steps=12))
    # The last bits are those of `sum`, which rounds less often from Python 3.12 on.
    assert [getattr(outcome, one) for one in NAMES] == pytest.approx(FIGURES[name], rel=1e-12, abs=0)


def accounts_close(run):
    ledger = run.ledger
    gone = ledger.trained.total() + ledger.masked + ledger.stale + ledger.filtered
    return sum(g.sampled for g in run.generators) == gone + run.held_tokens


def leaving(**rows):
    learner = {"seconds_per_token": 1e-4}
    made = rates(
        start_seconds=1.0, learner=learner, episode={"turns": 3, "turn_tokens": 20, "tool_seconds": 0.5}
    )
    return check_rates({**made.model_dump(exclude_none=True), "leaving": rows}, "test")


@pytest.mark.parametrize("needs", [{"sync": True}, {"recomputes": False}, {"shared": False}])
@pytest.mark.parametrize(
    "lost",
    [
        {"mean_seconds": 5.0, "back_seconds": 1.0},
        {"storm_seconds": 4.0, "storm_share": 0.9, "back_seconds": 1.0},
    ],
)
def test_no_token_is_lost_with_a_generator_whose_turns_go_on_elsewhere(lost, needs):
    run = Simulation(
        leaving(**lost),
        Setting(
            generators=3,
            actors=2,
            concurrent_episodes=8,
            members=2,
            batch_groups=4,
            max_policy_lag=1,
            **needs,
        ),
    )
    run.run(30)
    assert len(run.generators) > 3
    assert any(generator.gone for generator in run.generators)
    assert accounts_close(run)


def test_losses_cost_tokens_per_second():
    setting = Setting(
        generators=3, actors=4, concurrent_episodes=16, batch_groups=16, max_policy_lag=2, shared=False
    )
    calm = simulate(leaving(), setting).trained_tokens_per_second
    lossy = simulate(leaving(mean_seconds=4.0, back_seconds=4.0), setting).trained_tokens_per_second
    assert lossy < 0.9 * calm


def test_generators_may_come_and_go_by_command():
    run = Simulation(
        rates(start_seconds=1.0), Setting(generators=2, actors=2, batch_groups=8, max_policy_lag=1)
    )
    run.run(5)
    run.grow(generators=2, actors=1)
    assert (len(run.serving), run.starting) == (2, 3)
    run.run_until(run.now + 1.5)
    assert (len(run.serving), run.actors, run.starting) == (4, 3, 0)
    run.shrink(9)
    assert len(run.serving) == 1
    run.run(run.ledger.steps + 5)
    assert accounts_close(run)


def test_a_large_version_on_a_slow_line_makes_tokens_too_old():
    setting = Setting(
        generators=2, actors=2, concurrent_episodes=16, batch_groups=16, max_policy_lag=4, shared=False
    )
    fast = simulate(rates(), setting)
    slow = simulate(rates(version_bytes=1e9, bytes_per_second=1e9), setting)
    assert slow.stale_share > fast.stale_share == 0.0


@pytest.mark.parametrize("wrong", [{"version_bytes": 1e9}, {"bytes_per_second": 1e9}])
def test_size_and_rate_of_a_version_belong_together(wrong):
    with pytest.raises(ConfigError, match="give both"):
        rates(**wrong)


def many(generators, **more):
    """Return a setting with 32 episodes for each generator."""
    return Setting(
        generators=generators,
        actors=2 * generators,
        concurrent_episodes=32,
        members=4,
        batch_groups=4 * generators,
        max_policy_lag=2,
        shared=False,
        **more,
    )


def test_a_sample_of_equal_generators_finds_nearly_what_all_of_them_do(monkeypatch):
    made = rates(learner={"seconds_per_token": 2e-5}, episode={"turn_tokens": {"log_normal": [20, 0.5]}})
    setting = many(72, steps=8)
    monkeypatch.setattr(simulation, "LARGEST_WHOLE", 72)
    whole = simulate(made, setting)
    monkeypatch.setattr(simulation, "LARGEST_WHOLE", 16)
    monkeypatch.setattr(simulation, "MOST_TURNS", 4_000)
    assert simulation.sample_of(made, setting).generators < 36
    sample = simulate(made, setting)
    for name in (
        "trained_tokens_per_second",
        "sampled_tokens_per_second",
        "running_mean",
        "segments_per_second",
    ):
        assert getattr(sample, name) == pytest.approx(getattr(whole, name), rel=0.1), name
    assert sample.learner_idle_share == pytest.approx(whole.learner_idle_share, abs=0.1)


def test_a_thousand_generators_take_seconds_and_two_brokers():
    # The rates by hand of docs/run/capacity.md, with a learner that takes what a thousand generators sample.
    made = check_rates(
        {
            "generator": {
                "decode": [
                    {"sequences": 1, "tokens_per_second": 90},
                    {"sequences": 64, "tokens_per_second": 3800},
                    {"sequences": 256, "tokens_per_second": 9000},
                ],
                "prompt_tokens_per_second": 40000,
                "pause_seconds": 0.4,
            },
            "learner": {"seconds_per_token": 1e-7, "step_seconds": 0.8, "publish_seconds": 0.5},
            "episode": {
                "turns": {"uniform": [2, 6]},
                "prompt_tokens": 600,
                "turn_tokens": {"log_normal": [180, 0.8]},
                "observation_tokens": {"values": [40, 60, 400]},
                "tool_seconds": {"log_uniform": [0.2, 2.0]},
                "filtered_groups": 0.2,
            },
        },
        "test",
    )
    began = time.process_time()
    setting = Setting(
        generators=1000,
        actors=2000,
        concurrent_episodes=64,
        max_num_seqs=256,
        steps=25,
        members=8,
        batch_groups=6000,
        max_policy_lag=2,
        shared=False,
    )
    outcome = simulate(made, setting)
    assert time.process_time() - began < 60.0
    assert outcome.brokers == 2
    said = list(crowds(made, [(setting, outcome)]))
    assert said[0].startswith("1,000 generators are simulated as ")
    assert "a broker takes 7,500 (not measured here): that needs 2 brokers" in said[1]
