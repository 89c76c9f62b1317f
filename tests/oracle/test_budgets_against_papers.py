"""Budgets against slow twins that are written from the cards of their papers, and the numbers of the cards."""

import math

import numpy as np
import pytest

from learner.budget import (
    group_sizes,
    shared_out,
    t_quantile,
    t_quantiles,
    uncertainty_gains,
    utility,
    value_gains,
)
from learner.errors import FormulaError
from learner.selection import Answer, TaskStats
from learner.settings.budget import UncertaintyBudget, ValueBudget
from learner.settings.learner import LearnerConfig
from learner.settings.rules import contradictions


def slow_greedy(gains, budget):
    """Give one after the other to the task whose next one gains most."""
    given = [0] * len(gains)
    last = None
    for _ in range(budget):
        open_tasks = [q for q in range(len(gains)) if given[q] < len(gains[q])]
        if not open_tasks:
            break
        best = max(gains[q][given[q]] for q in open_tasks)
        ties = [q for q in open_tasks if gains[q][given[q]] == best]
        last = last if last in ties else ties[0]
        given[last] += 1
    return given


@pytest.mark.parametrize("seed", range(20))
def test_answers_go_one_by_one_to_the_task_that_gains_most(seed):
    rng = np.random.default_rng(seed)
    gains = rng.random((6, 5))
    for budget in (0, 1, 7, 13, 30):
        assert shared_out(gains, budget).tolist() == slow_greedy(gains.tolist(), budget), budget


def test_the_half_widths_are_those_of_the_card():
    # Card a6: s = .5, n = 4, alpha = .05 (t = 3.182, 2.776): gain = .7955 - .6207 = .1748.
    assert t_quantile(0.975, 3) == pytest.approx(3.182, abs=5e-4)
    assert t_quantile(0.975, 4) == pytest.approx(2.776, abs=5e-4)
    config = UncertaintyBudget(explore=0.0)
    # Two members and the two answers of the prior.
    found = uncertainty_gains(config, np.array([0.5]), np.zeros(1), np.array([2]), spent=0.0)
    assert found[0, 0] == pytest.approx(0.1748, abs=1e-4)


def test_many_answers_to_a_task_take_no_longer():
    """With a long half-life they are never forgotten. Each quantile took as long as it has degrees of freedom."""
    exact = [t_quantile(0.975, df) for df in (1, 199, 200, 201, 300, 1000)]
    found = t_quantiles(0.975, 1_000_000)
    assert found[[0, 198, 199, 200, 299, 999]] == pytest.approx(exact, abs=1e-8)
    assert found[-1] == pytest.approx(1.959966, abs=1e-6)
    assert (np.diff(found) < 0).all()
    stats = TaskStats(tasks=2, half_life=1e9)
    stats.attempts[:] = 1_000_000, 10
    stats.right[:] = 500_000, 5
    assert group_sizes(UncertaintyBudget(), stats, 8).tolist() == [2, 14]


def test_the_bonus_has_the_root():
    config = UncertaintyBudget(explore=0.1)
    plain = uncertainty_gains(
        UncertaintyBudget(explore=0.0), np.array([0.3]), np.array([6.0]), np.array([2]), spent=99
    )
    with_bonus = uncertainty_gains(config, np.array([0.3]), np.array([6.0]), np.array([2]), spent=99)
    assert (with_bonus - plain)[0, 0] == pytest.approx(0.1 * math.sqrt(math.log(100) / 10))


def test_utilities_are_those_of_the_card():
    # Card c38: U(1, p) = 0; U(8, .1) = 3.756262, U(8, .5) = 3.96875, U(8, .9) = .8.
    found = utility(np.array([0.3, 0.1, 0.5, 0.9]), np.array([1, 8, 8, 8]))
    np.testing.assert_allclose(found, [0, 3.756262, 3.96875, 0.8], atol=1e-6)
    # U(B + 1) - U(B) at p = .1: .18, .86, 1.03, .91, .90 at B = 1, 8, 16, 64, 256. It never falls to nothing.
    gains = value_gains(np.array([0.1]), np.array([1, 8, 16, 64, 256]))
    np.testing.assert_allclose(gains[0], [0.18, 0.86, 1.03, 0.91, 0.90], atol=5e-3)


def stats_of(*rights, groups=4):
    stats = TaskStats(len(rights), half_life=1e9)
    for task, right in enumerate(rights):
        for number in range(groups):
            stats.add(task, number, [Answer(float(i < right)) for i in range(8)])
    return stats


@pytest.mark.parametrize("config", [UncertaintyBudget(), ValueBudget()])
def test_sizes_add_up_and_keep_their_bounds(config):
    sizes = group_sizes(config, stats_of(0, 1, 4, 7, 8), 8)
    assert sizes.sum() == 40
    assert sizes.min() >= config.smallest
    assert sizes.max() <= config.largest


def test_uncertain_tasks_get_more_and_certain_ones_less():
    sizes = group_sizes(UncertaintyBudget(explore=0.0), stats_of(0, 4, 8), 8)
    assert sizes[1] > sizes[0]
    assert sizes[0] == sizes[2]


def test_by_value_solved_tasks_get_least_and_the_others_up_to_the_cap():
    # At p = .5 each further answer gains more than .5; at p = 5/34 the third one gains .447, and later ones more.
    sizes = group_sizes(ValueBudget(largest=16), stats_of(1, 4, 8, 8), 8)
    assert sizes.tolist() == [12, 16, 2, 2]


PREDICT = """
import numpy as np

def flat(stats):
    return np.full(stats.tasks, 0.5)

def wrong(stats):
    return [2.0] * stats.tasks
"""


def test_a_prediction_of_the_users_own_takes_the_place_of_the_answers(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PREDICT)
    flat = UncertaintyBudget(explore=0.0, predict={"kind": f"{file}:flat"})
    stats = stats_of(0, 4, 8)
    assert len(set(group_sizes(flat, stats, 8).tolist())) == 1
    wrong = UncertaintyBudget(predict={"kind": f"{file}:wrong"})
    with pytest.raises(FormulaError, match="return one probability, 0 to 1, for each of the 3 tasks"):
        group_sizes(wrong, stats, 8)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "each task comes once"),
        ({"selection": {"kind": "near", "tasks": 100_000}}, "at most 20,000 tasks"),
        ({"selection": {"kind": "near"}, "train_on": "trajectories"}, 'use train_on = "groups"'),
        ({"selection": {"kind": "near"}, "group_size": 32}, "of which it is the mean"),
        ({"selection": {"kind": "near"}, "family": {"kind": "judge", "answers": 4}}, "divides a group"),
        ({"selection": {"kind": "near"}, "algorithm": {"advantage": {"kind": "greedy"}}}, "have one size"),
    ],
)
def test_a_budget_that_cannot_be_shared_out_is_refused(settings, words):
    config = LearnerConfig(**({"budget": {"kind": "by_value"}} | settings))
    assert any(words in line for line in contradictions(config))
