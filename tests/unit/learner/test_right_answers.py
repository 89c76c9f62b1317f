"""What is right, what is equal, and what a word that cannot occur adds: one notion each, wherever it is asked."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.advantages import Quantiles, risk_advantages
from learner.comparisons import compared_advantages, has_signal
from learner.rewards import call_factor, composed, is_right, win_rates
from learner.settings.advantages import ComparedAdvantage, GroupAdvantage, RewardConfig, RiskAdvantage
from learner.update.target_logp import select
from tests.trajectories import make_trajectory


def answers(*rows, group="g0"):
    """Return trajectories of one group from (reward, right) or (reward, right, logp)."""
    return [
        make_trajectory(f"{group}.{i}", group=group, reward=row[0], correct=row[1], logp=[*row, -3.0][2])
        for i, row in enumerate(rows)
    ]


def test_a_wrong_answer_with_partial_credit_is_not_right():
    right, partial, unknown = answers((1.0, True), (0.4, False), (0.4, None))
    assert [is_right(t, "score") for t in (right, partial, unknown)] == [True, False, True]


def test_the_bonus_for_novelty_goes_to_right_answers_alone():
    """The unlikely answer of partial credit is above the mean, and gets nothing."""
    members = answers((1.0, True, -1.0), (0.6, False, -5.0), (0.0, False, -1.0), (0.0, False, -1.0))
    plain = compared_advantages(ComparedAdvantage(), members)
    novel = compared_advantages(ComparedAdvantage(novelty={}), members)
    assert plain[1] > 0
    np.testing.assert_array_equal(plain, novel)
    right = [replace(t, correct=True) for t in members[:2]] + members[2:]
    assert compared_advantages(ComparedAdvantage(novelty={}), right)[1] > plain[1]
    by_return = ComparedAdvantage(novelty={"value": "return"})
    np.testing.assert_array_equal(compared_advantages(by_return, members), plain)


def test_fewer_calls_are_rewarded_among_right_answers_alone():
    """A wrong answer of partial credit without a call is no measure of the fewest calls."""
    members = [
        make_trajectory("a", reward=1.0, correct=True),
        make_trajectory("b", reward=0.3, correct=False),
    ]
    members = [replace(t, turns=t.turns if i else [*t.turns, *_more(t)]) for i, t in enumerate(members)]
    config = RewardConfig(group={"kind": "fewest_calls", "reward": "score"})
    assert [t.return_ for t in composed(config, members)] == [1.0, 0.3]
    assert call_factor(1, 0) < 1


def _more(t):
    from protocol.messages.episodes import Turn

    return [Turn(2, len(t), len(t), False), Turn(3, len(t), len(t), True)]


def test_a_flaw_and_the_value_of_wrong_answers_ask_the_environment():
    partial = make_trajectory("a", reward=0.4, correct=False)
    flawed = RewardConfig(flawed={"reward": "score", "needs": "step", "least": 0.1})
    wrong = RewardConfig(wrong={"reward": "score"})
    assert [t.return_ for t in composed(flawed, [partial])] == [0.4]
    assert [t.return_ for t in composed(wrong, [partial])] == [-1.0]


def test_difficulty_is_the_share_of_right_answers_and_unsolved_tasks_weigh_as_easy_ones():
    """In MathForge's program a task that nobody solves has the weight of an easy one. Partial credit says nothing."""
    hard = answers((1.0, True), (0.9, False), (0.9, False), (0.8, False), group="hard")
    easy = answers((1.0, True), (1.0, True), (1.0, True), (0.0, False), group="easy")
    never = answers((0.9, False), (0.9, False), (0.5, False), (0.0, False), group="never")
    plain = ComparedAdvantage(terms=({"scale": "mean_abs"},))
    weighed = plain.model_copy(update={"by_difficulty": ComparedAdvantage(by_difficulty={}).by_difficulty})
    members = [*hard, *easy, *never]
    weight = (compared_advantages(weighed, members) / compared_advantages(plain, members))[[0, 4, 8]]
    expected = np.exp(-np.array([0.25, 0.75, 1.0]) / 2)
    np.testing.assert_allclose(weight, 3 * expected / expected.sum())


@pytest.mark.parametrize("returns", [[0.3, 0.1 + 0.2, 0.3], [1e9, 1e9 + 1e-7, 1e9]])
def test_returns_that_are_equal_up_to_rounding_are_a_draw_and_no_signal(returns):
    assert win_rates(returns) == [0.5] * 3
    assert not has_signal(GroupAdvantage(), answers(*((r, None) for r in returns)))
    assert has_signal(GroupAdvantage(), answers((0.3, None), (0.31, None)))


def test_shares_of_a_paper_are_bounded_with_partial_credit():
    """Differences that nearly add up to 0 made advantages above 100."""
    rng = np.random.default_rng(3)
    rows = rng.random((96, 8))
    members = [
        t for g, row in enumerate(rows) for t in answers(*((float(r), False) for r in row), group=f"g{g}")
    ]
    config = RiskAdvantage(bundle=4)
    bounded, _ = risk_advantages(config, members, None)
    unbounded, _ = risk_advantages(config.model_copy(update={"most_share": 1e9}), members, None)
    assert np.abs(unbounded).max() > 2 * np.abs(bounded).max()
    assert np.abs(bounded).max() < config.most_share * 5


def test_a_lone_paper_is_divided_by_1_and_others_by_the_deviation_of_the_sample():
    lone = [t for g in range(2) for t in answers((float(g), None), group=f"g{g}")]
    assert risk_advantages(RiskAdvantage(bundle=2), lone, Quantiles(0.0, 5.0))[0].any()
    two = [t for g in range(2) for t in answers((0.0, None), (1.0, None), group=f"g{g}")]
    (found, _) = risk_advantages(RiskAdvantage(bundle=2, mix=0.0), two, Quantiles(0.0, 5.0))
    # Papers of sums 0 and 2: the sample's deviation is sqrt 2; the middle of the second is 2 / .6, half for each task.
    assert found[1] == pytest.approx(2 / 0.6 / 2**0.5 / 2, rel=1e-5)


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_a_word_that_cannot_occur_adds_nothing_to_the_entropy(entropy_gradient):
    logits = torch.tensor([[0.5, -float("inf"), 1.5], [0.0, 0.0, -float("inf")]], requires_grad=True)
    target, temperature = torch.tensor([2, 0]), torch.ones(2)
    logp, entropy = select(logits, target, temperature, entropy_gradient=entropy_gradient)
    short = torch.tensor([[0.5, 1.5], [0.0, 0.0]], requires_grad=True)
    expected_logp, expected = select(
        short, torch.tensor([1, 0]), temperature, entropy_gradient=entropy_gradient
    )
    torch.testing.assert_close(entropy, expected)
    torch.testing.assert_close(logp, expected_logp)
    (logp.sum() + (3 * entropy.sum() if entropy_gradient else 0)).backward()
    (expected_logp.sum() + (3 * expected.sum() if entropy_gradient else 0)).backward()
    assert torch.isfinite(logits.grad).all()
    torch.testing.assert_close(logits.grad[0, [0, 2]], short.grad[0])
    torch.testing.assert_close(logits.grad[1, :2], short.grad[1])
