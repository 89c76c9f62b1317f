"""pass@k against the program of its paper, against counting all choices, and against numbers worked by hand."""

import itertools
import math

import numpy as np
import pytest

from learner.intake.evaluation import mean_over_tasks, pass_at_k


def published(n, c, k):
    """The numpy program of arXiv:2107.03374, figure 3."""
    if n - c < k:
        return 1.0
    return 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 16, 200])
def test_it_is_the_published_estimate(n):
    rng = np.random.default_rng(n)
    ks = {1, n, *rng.integers(1, n + 1, 6).tolist()}
    for c, k in itertools.product({0, 1, n, *rng.integers(0, n + 1, 6).tolist()}, ks):
        c = min(c, n)
        assert pass_at_k(n, c, k) == pytest.approx(published(n, c, k), abs=1e-12)


def test_it_is_the_share_of_choices_with_a_right_answer():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (10, 3, 1, 0.3),
        # 1 - C(7, 5) / C(10, 5) = 1 - 21 / 252.
        (10, 3, 5, 1 - 1 / 12),
        # 1 - C(3, 2) / C(5, 2) = 1 - 3 / 10.
        (5, 2, 2, 0.7),
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
        (4, 2, 3, 1.0),
    ],
)
def test_numbers_worked_by_hand(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value)


def test_it_is_unbiased():
    """The mean over binomial draws of c is 1 - (1 - p)^k, for every n."""
    for n, k, p in ((4, 2, 0.3), (6, 4, 0.1), (8, 8, 0.5)):
        chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        mean = sum(weight * pass_at_k(n, c, k) for c, weight in enumerate(chance))
        assert mean == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0), (3, -1, 1)])
def test_numbers_out_of_range_are_refused(n, c, k):
    with pytest.raises(ValueError, match="needed are"):
        pass_at_k(n, c, k)


def test_the_interval_of_right_and_wrong_is_wilsons():
    """Reference: the interval of 81 of 263 in Newcombe (1998), Statistics in Medicine 17, table I, method 3."""
    found = mean_over_tasks([1.0] * 81 + [0.0] * 182)
    assert [round(x, 4) for x in found] == [0.308, 0.2553, 0.3662]
    assert mean_over_tasks([0.0] * 20)[:2] == pytest.approx((0.0, 0.0))
    assert mean_over_tasks([0.0] * 20).high == pytest.approx(0.1611, abs=1e-4)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        chances = rng.beta(2.0, 3.0, 64)
        right = rng.binomial(8, chances)
        found = mean_over_tasks([pass_at_k(8, int(c), 1) for c in right])
        held += found.low <= 0.4 <= found.high
    assert 0.91 <= held / 400 <= 0.98
