"""Each kind of selection against a slow twin that is written from the card of its paper."""

import math

import numpy as np
import pytest

from learner.population import Population, instruction_chances
from learner.selection import Answer, TaskStats, choose, near_weights
from learner.settings.selection import (
    FailuresSelection,
    FilterSelection,
    NearSelection,
    PopulationSelection,
    PruneSelection,
    ValueSelection,
)

DRAWS = 2_000


def group(right, of=8):
    return [Answer(float(i < right)) for i in range(of)]


def stats_of(*groups, half_life=1e9):
    """Return stats after one group of each task with so many right answers of 8."""
    stats = TaskStats(len(groups), half_life)
    for task, right in enumerate(groups):
        stats.deal(task)
        stats.add(task, task, group(right))
    return stats


def frequencies(config, stats, busy=()):
    drawn = [choose(config, stats, np.random.default_rng([0, deal]), busy) for deal in range(DRAWS)]
    return np.bincount(drawn, minlength=stats.tasks) / DRAWS


def slow_near(rates, target, temperature):
    weights = [math.exp(-abs(p - target) / temperature) for p in rates]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("temperature", [0.05, 0.3, 2.0])
def test_near_has_the_weights_of_dots(temperature):
    # Card b39: softmax(-|p - alpha| / T).
    rates = np.array([0.0, 0.2, 0.45, 0.7, 1.0])
    found = near_weights(rates, np.ones(5, bool), 0.5, temperature)
    np.testing.assert_allclose(found, slow_near(rates, 0.5, temperature), rtol=1e-12)
    stats = stats_of(0, 2, 4, 6, 8)
    config = NearSelection(tasks=5, explore=0.0, temperature=temperature)
    expected = slow_near([1 / 10, 3 / 10, 5 / 10, 7 / 10, 9 / 10], 0.5, temperature)
    np.testing.assert_allclose(frequencies(config, stats), expected, atol=0.04)


def test_near_at_the_papers_temperature_takes_the_nearest_task():
    # Card b39: rates (0, .25, .5, .75, 1) at T = 1e-3 give probability 1 to one half; the next is about 1e-109.
    weights = near_weights(np.array([0.0, 0.25, 0.5, 0.75, 1.0]), np.ones(5, bool), 0.5, 1e-3)
    assert weights[2] == 1.0
    assert 1e-110 < weights[1] < 1e-108


def test_near_takes_a_task_under_way_only_if_nothing_else_is_left():
    stats, config = stats_of(0, 4, 8), NearSelection(tasks=3, explore=0.0)
    assert frequencies(config, stats)[1] == 1.0
    assert frequencies(config, stats, busy=[1])[1] == 0.0
    assert frequencies(config, stats, busy=[0, 1, 2])[1] == 1.0


def test_near_explores_the_task_that_was_dealt_least():
    stats = stats_of(0, 4, 8)
    stats.deal(1), stats.deal(2)
    share = frequencies(NearSelection(tasks=3, explore=0.25), stats)
    assert share[0] == pytest.approx(0.25, abs=0.03)
    assert share[2] == 0


def test_a_failed_task_comes_again_until_its_first_success():
    config, stats = FailuresSelection(tasks=3, again=1.0), stats_of(0, 4, 0)
    # The one that failed first comes first, as in a queue.
    assert frequencies(config, stats)[0] == 1.0
    stats.add(0, 3, group(0))
    assert frequencies(config, stats)[2] == 1.0
    stats.add(2, 4, group(1))
    assert frequencies(config, stats)[0] == 1.0
    stats.add(0, 5, group(8))
    assert not stats.failed.any()
    assert (frequencies(config, stats) > 0.2).all()


def test_half_of_the_groups_are_for_failures():
    share = frequencies(FailuresSelection(tasks=3, again=0.5), stats_of(0, 4, 4))
    assert share[0] == pytest.approx(0.5, abs=0.04)


def test_a_task_that_is_solved_often_enough_is_left_out():
    # Card b52: pruned from a solve rate of 0.9 on.
    stats = TaskStats(3)
    for task, right in enumerate((8, 9, 10)):
        stats.add(task, task, group(right, of=10))
    share = frequencies(PruneSelection(tasks=3), stats)
    assert share.tolist() == [1.0, 0.0, 0.0]
    # With nothing left, the whole list is dealt.
    stats.add(0, 3, group(1000, of=1000))
    assert (frequencies(PruneSelection(tasks=3), stats) > 0.2).all()


def test_after_the_first_pass_only_tasks_that_were_solved_come():
    config, stats = FilterSelection(tasks=4), TaskStats(4)
    first = []
    for deal in range(4):
        first.append(choose(config, stats, np.random.default_rng([0, deal])))
        stats.deal(first[-1])
    assert sorted(first) == [0, 1, 2, 3]
    for task, right in enumerate((0, 1, 0, 8)):
        stats.add(task, task, group(right))
    share = frequencies(config, stats)
    assert share[0] == share[2] == 0
    assert share[1] == pytest.approx(0.5, abs=0.04)
    # A later failure does not put it out.
    stats.add(1, 5, group(0))
    assert frequencies(config, stats)[1] > 0.4


def test_values_are_those_of_the_card():
    # Card a4: V = (1 - p) sqrt(p (1 - p)): .2894 at 1/8, .3248 at 1/4, .25 at 1/2, .1083 at 3/4.
    stats = stats_of(1, 2, 4, 6, 0, 8)
    np.testing.assert_allclose(stats.value, [0.2894, 0.3248, 0.25, 0.1083, 0, 0], atol=5e-5)


def test_tasks_are_drawn_in_proportion_to_their_values():
    stats = stats_of(1, 2, 4, 6, 0, 8)
    expected = np.array([0.2894, 0.3248, 0.25, 0.1083, 0, 0]) / 0.9725
    share = frequencies(ValueSelection(tasks=6, explore=0.0), stats)
    np.testing.assert_allclose(share, expected, atol=0.03)


def test_each_task_is_dealt_once_before_its_value_counts():
    stats, config = TaskStats(4), ValueSelection(tasks=4, explore=0.0)
    for deal in range(4):
        task = choose(config, stats, np.random.default_rng([0, deal]))
        stats.deal(task)
        stats.add(task, deal, group(2))
    assert stats.dealt.tolist() == [1, 1, 1, 1]


def test_uses_count_a_task_among_the_last_groups():
    stats = TaskStats(4)
    for task in (3, 0, 0, 1, 0):
        stats.deal(task)
    # The last four with the one to come are 0, 1, 0 and it.
    assert [stats.uses(task) for task in range(4)] == [3, 2, 1, 1]


def test_an_answer_counts_half_after_so_many_further_ones():
    stats = TaskStats(1, half_life=8)
    stats.add(0, 0, group(8))
    stats.add(0, 1, group(0))
    assert stats.attempts[0] == pytest.approx(12)
    assert stats.right[0] == pytest.approx(4)
    one = TaskStats(1, half_life=8)
    for number in range(16):
        one.add(0, number, [Answer(float(number < 8))])
    # Member by member it is nearly the same: each answer fades by those behind it.
    assert one.right[0] / one.attempts[0] == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize(("correct", "right"), [(None, True), (False, False), (True, True)])
def test_right_is_what_the_environment_says(correct, right):
    assert Answer(0.5, correct).right is right


# --- INSPO, arXiv:2512.01945 -----------------------------------------------------------------------------------


def population(*rates, **settings):
    """Return a population after one group of each instruction with so many right answers of 8."""
    texts = tuple(f"instruction {number}" for number in range(len(rates)))
    made = Population(PopulationSelection(instructions=texts, **settings))
    for number, right in enumerate(rates):
        made.add(number, number, group(right))
    return made


@pytest.mark.parametrize("temperature", [0.05, 0.3, 2.0])
def test_instructions_have_the_chances_of_inspo(temperature):
    # Card a11: p = softmax(w / tau).
    weights = np.array([1.0, 0.25, 0.5])
    slow = [math.exp(w / temperature) for w in weights]
    found = instruction_chances(weights, np.ones(3, bool), temperature)
    np.testing.assert_allclose(found, [w / sum(slow) for w in slow], rtol=1e-12)


def test_chances_of_instructions_by_hand():
    # Rates 1, .5 and 0 at tau = .5: exp(2) = 7.389, exp(1) = 2.718, exp(0) = 1; their sum is 11.107.
    found = population(8, 4, 0, temperature=0.5, prune_every=0).chances
    np.testing.assert_allclose(found, [0.6652, 0.2447, 0.0900], atol=5e-5)
    # Card a11: equal weights give a uniform draw.
    assert population(4, 4, 4, 4).chances.tolist() == [0.25] * 4


def test_an_instruction_is_drawn_with_its_chance():
    made = population(8, 4, 0, temperature=0.5, prune_every=0)
    drawn = [made.choose(np.random.default_rng([0, number])) for number in range(DRAWS)]
    np.testing.assert_allclose(np.bincount(drawn) / DRAWS, made.chances, atol=0.04)


def test_earlier_answers_to_an_instruction_fade():
    # 8 answers of 1, then 8 of 0 with a half-life of 8: (0.5 * 8 + 0) / (0.5 * 8 + 8) = 1/3.
    made = population(8, 4, half_life=8, prune_every=0)
    made.add(0, 2, group(0))
    np.testing.assert_allclose(made.weights, [1 / 3, 1 / 2])


def test_the_one_good_instruction_of_six_gets_most_groups():
    """Of six instructions one is right in 0.7 of the answers, the others in 0.3: the bar is 0.8."""
    texts = tuple("abcdef")
    for seed in range(5):
        made = Population(PopulationSelection(instructions=texts, prune_every=0))
        answers = np.random.default_rng(seed)
        for number in range(400):
            drawn = made.choose(np.random.default_rng([seed, number]))
            right = answers.random(8) < (0.7 if drawn == 4 else 0.3)
            made.add(drawn, number, [Answer(float(one)) for one in right])
        assert made.chances[4] > 0.8
