"""As little work is under way as keeps the learner fed: a replay of measured durations, and the plan's simulator."""

import time
from dataclasses import replace

import numpy as np
import pytest

from launch.errors import ConfigError
from launch.plan.parts import Setting
from launch.plan.rates import check_rates
from launch.plan.simulation import simulate
from launch.run_file.load import check
from learner.curriculum import Curriculum
from learner.settings.learner import LearnerConfig
from learner.under_way import UnderWay, waiting_share


def slow_waiting_share(seconds, update_s, batch, under_way, steps=400):
    """Return the share by a list of units that are looked through, without gaps and drops."""
    rng, units, now, waited = np.random.default_rng(0), [], 0.0, 0.0
    for _ in range(steps):
        units += [now + rng.choice(seconds) for _ in range(under_way - len(units))]
        units.sort()
        ready = max(now, units[batch - 1])
        waited += ready - now
        units, now = units[batch:], ready + update_s
    return waited / now


@pytest.mark.parametrize(
    "seconds", [[0.2], [1.3], [0.1, 0.2, 3.0], list(np.random.default_rng(1).lognormal(0, 1, 64))]
)
@pytest.mark.parametrize("under_way", [8, 12, 16, 24, 40])
def test_the_share_equals_a_slow_twins(seconds, under_way):
    found = waiting_share(seconds, update_s=1.0, batch=8, under_way=under_way)
    assert found == pytest.approx(slow_waiting_share(seconds, 1.0, 8, under_way), abs=0.06)


def test_units_that_are_dropped_make_the_learner_wait():
    shares = [
        waiting_share([0.9], update_s=1.0, batch=8, under_way=16, dropped=dropped)
        for dropped in (0, 0.3, 0.6)
    ]
    assert shares == sorted(shares)
    assert shares[0] == 0 < shares[2]


def test_arrivals_are_no_faster_than_they_were():
    assert waiting_share([0.1], update_s=1.0, batch=8, under_way=40, gap_s=0.25) == pytest.approx(
        0.5, abs=0.02
    )


def test_nothing_is_decided_before_durations_are_known():
    work = UnderWay(batch=4)
    assert [work.wanted(most) for most in (4, 8, 20)] == [4, 8, 8]
    for _ in range(40):
        work.arrived(None, trained=True)
        work.trained(1.0, 1.0)
    assert work.wanted(20) == 8


@pytest.mark.parametrize("seed", range(20))
def test_it_is_within_the_bound_and_never_below_a_batch(seed):
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 65))
    work = UnderWay(batch)
    for _ in range(6):
        for _ in range(int(rng.integers(0, 2 * batch + 1))):
            work.arrived(float(rng.lognormal(rng.normal(), 1)), trained=bool(rng.random() < 0.8))
        work.trained(float(rng.random()), float(1 + rng.random()))
    for lag in range(6):
        most = (lag + 1) * batch
        assert batch <= work.wanted(most) <= most


def test_a_decision_takes_milliseconds():
    work = UnderWay(batch=512)
    for _ in range(16):
        for _ in range(512):
            work.arrived(1.0, trained=True)
        work.trained(1.0, 1.0)
    began = time.process_time()
    work.wanted(512 * 9)
    assert time.process_time() - began < 0.5


STEP = {"step_seconds": 1.0, "seconds_per_token": 0.0}
LOADS = {
    "short answers": (STEP, {"turn_tokens": 10}, 0.3),
    "answers as long as a step": (STEP, {"turn_tokens": 40}, 0.5),
    "a heavy tail": (STEP, {"turn_tokens": {"log_normal": [20, 1.0]}}, 0.55),
    "slow tools": (STEP, {"turn_tokens": 5, "turns": 3, "tool_seconds": {"log_uniform": [0.1, 1.0]}}, 0.68),
    "half of the groups have no signal": (STEP, {"turn_tokens": 10, "filtered_groups": 0.5}, 0.5),
    # No token is sampled before an engine has a place for it, so that more work in the queue makes none older.
    "the engine limits": ({**STEP, "step_seconds": 0.2}, {"turn_tokens": 60}, 1.0),
}
"""Learner and episode of a plan, and the most that lag may be of what it is at the bound."""


@pytest.mark.parametrize("load", LOADS)
def test_the_learner_is_fed_and_tokens_are_younger(load):
    """With the default bound of four versions."""
    learner, episode, share = LOADS[load]
    points = [{"sequences": n, "tokens_per_second": float(r)} for n, r in ((1, 100), (32, 1600), (64, 2400))]
    world = {"generator": {"decode": points}, "sharing": {"slowdown": 1.0, "cores": 2}}
    rates = check_rates(world | {"learner": learner, "episode": episode}, "test")
    setting = Setting(concurrent_episodes=64, members=4, batch_groups=8, max_policy_lag=4, shared=False)
    bound, needed = (simulate(rates, replace(setting, needed=needed)) for needed in (False, True))
    assert needed.learner_idle_share <= bound.learner_idle_share + 0.02
    assert needed.lag_mean_versions <= share * bound.lag_mean_versions + 1e-9


def test_the_curriculum_deals_as_much_as_is_needed():
    config = LearnerConfig(group_size=2, batch_trajectories=8, max_policy_lag=4, under_way="needed")
    curriculum = Curriculum("e", config)
    assert len(curriculum.refill(version=0, lockstep=False)) == 16
    for _ in range(4):
        for _ in range(4):
            curriculum.under_way.arrived(3.0, trained=True)
        curriculum.under_way.trained(1.0, 1.0)
    assert 16 < curriculum.capacity(lockstep=False) <= 40
    assert curriculum.wanted_trajectories == curriculum.capacity(lockstep=False)
    assert curriculum.capacity(lockstep=True) == 8


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"learner": {"under_way": "needed"}, "run": {"mode": "sync"}}, "nothing is sampled ahead"),
        (
            {"learner": {"under_way": "needed", "train_on": "windows"}},
            'has no figures for learner.train_on = "windows"',
        ),
    ],
)
def test_where_it_cannot_act_it_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        check({"model": {"path": "m"}, "env": {"name": "calculator"}} | settings, "run.toml")
