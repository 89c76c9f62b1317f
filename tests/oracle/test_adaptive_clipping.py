"""Test adaptive clipping and the prediction of entropy against slow twins from the papers and hand-worked numbers."""

import math

import numpy as np
import pytest
import torch

from learner.algorithms.entropy import (
    entropy_change,
    entropy_quadrants,
    entropy_signal,
    hapo_bounds,
    hapo_redistribute,
)
from learner.algorithms.surrogates import (
    BalancedBounds,
    balance_path,
    balance_sums,
    choose_bounds,
    clipped_surrogate,
    lag_bounds,
)

RNG = np.random.default_rng(5)
PUBLISHED = {"low": (0.6, 0.9), "high": (1.2, 3.0), "low_step": 0.02, "high_step": 0.05}
NEGATIVE, POSITIVE = [0.5, 0.55, 0.62, 0.69, 0.81, 0.9, 1.0, 1.1], [1.0, 1.31, 1.78, 2.57]


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


RATIO, ADVANTAGE = doubles(NEGATIVE + POSITIVE), doubles([-1.0] * 8 + [1.0] * 4)


def positive_share(ratios, advantages, weights, low, high, measure):
    """Return rho(low, high) of arXiv:2510.18927, computed token by token."""
    plus, minus = 0.0, 0.0
    for r, a, w in zip(ratios, advantages, weights, strict=True):
        if measure == "value" and a > 0:
            plus += w * abs(min(r * a, min(max(r, 0), high) * a))
        elif measure == "value" and a < 0:
            minus += w * abs(min(r * a, min(max(r, low), high) * a))
        elif measure == "gradient" and a > 0 and r <= high:
            plus += w * abs(r * a)
        elif measure == "gradient" and a < 0 and r >= low:
            minus += w * abs(r * a)
    return plus / (plus + minus) if minus else 1.0


def published_search(ratios, advantages, weights, target, measure, low, high, low_step, high_step):
    """Run the loop as the paper prints it, with counters in place of sums of floats."""
    i, j = 0, 0
    room = lambda start, k, step, stop: start + (k + 1) * step <= stop + 1e-9  # noqa: E731
    while True:
        at = low[0] + i * low_step, high[0] + j * high_step
        share = positive_share(ratios, advantages, weights, *(round(x, 12) for x in at), measure)
        if not (share < target and room(low[0], i, low_step, low[1])):
            return *at, share, i + j
        if room(high[0], j, high_step, high[1]):
            j += 1
        else:
            i += 1


def search(ratio, advantage, *, target, measure, weight=None, **path):
    positions = balance_path(**({**PUBLISHED, "order": "paper"} | path))
    weight = torch.ones_like(ratio) if weight is None else weight
    sums = balance_sums(ratio, advantage, weight, positions, measure=measure)
    return choose_bounds(sums, positions, target=target)


@pytest.mark.parametrize(
    ("measure", "bounds", "expected"),
    [
        ("value", (0.6, 1.2), 0.4212),
        ("value", (0.6, 3.0), 0.5131),
        ("value", (0.9, 3.0), 0.4703),
        ("gradient", (0.6, 1.2), 0.1634),
        ("gradient", (0.6, 3.0), 0.5654),
        ("gradient", (0.7, 3.0), 0.6361),
        ("gradient", (0.9, 3.0), 0.6894),
    ],
)
def test_share_of_positives_by_hand(measure, bounds, expected):
    """The bounds are (.6, 1.2) in both examples.

    value: positives 1 + 3 · 1.2 = 4.6, negatives 2 · .6 + .62 + .69 + .81 + .9 + 1 + 1.1 = 6.32.
    gradient: 1 over 1 + 5.12, because .5 and .55 are cut, and so are 1.31, 1.78 and 2.57.
    """
    plus, minus = balance_sums(RATIO, ADVANTAGE, torch.ones(12), [bounds], measure=measure)[0].tolist()
    assert plus / (plus + minus) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("measure", "target", "low", "high", "moves"),
    [
        ("value", 0.4, 0.6, 1.2, 0),
        ("value", 0.45, 0.6, 1.45, 5),
        ("value", 0.6, 0.9, 3.0, 36 + 15),
        ("gradient", 0.4, 0.6, 1.8, 12),
        ("gradient", 0.45, 0.6, 2.6, 28),
        ("gradient", 0.6, 0.7, 3.0, 36 + 5),
    ],
)
def test_search_by_hand(measure, target, low, high, moves):
    """gradient with target .4: only 1.78 <= high adds enough, (1 + 1.31 + 1.78) / 9.21 = .4441."""
    found = search(RATIO, ADVANTAGE, target=target, measure=measure)
    assert found[:2] == (low, high)
    assert found.moves == moves
    assert (found.share >= target) == (moves < 51)
    if (measure, target) == ("gradient", 0.4):
        assert found.share == pytest.approx(0.4441, abs=5e-5)


@pytest.mark.parametrize("measure", ["value", "gradient"])
@pytest.mark.parametrize("target", [0.0, 0.3, 0.4, 0.5, 0.6, 0.9])
@pytest.mark.parametrize("low_stop", [0.9, 0.6, 0.61])
def test_search_equals_the_printed_loop(measure, target, low_stop):
    """A range of `low` without room for a step stops the loop before `high` moves."""
    ratios, advantages = RNG.lognormal(0, 0.6, 60), RNG.normal(-0.3, 1, 60)
    weights = RNG.uniform(0, 1, 60)
    settings = PUBLISHED | {"low": (0.6, low_stop)}
    low, high, share, moves = published_search(ratios, advantages, weights, target, measure, **settings)
    found = search(
        doubles(ratios),
        doubles(advantages),
        weight=doubles(weights),
        target=target,
        measure=measure,
        **settings,
    )
    assert found[:3] == pytest.approx((low, high, share))
    assert found.moves == moves
    assert low_stop == 0.9 or moves == 0


@pytest.mark.parametrize("measure", ["value", "gradient"])
def test_limits_of_the_search(measure):
    """Target 0 or no negatives: no move. No positives: 36 + 15 moves, which end exactly at the stops."""
    still = BalancedBounds(0.6, 1.2, 0.0, 0)
    assert search(RATIO, -ADVANTAGE.abs(), target=0.0, measure=measure) == still
    assert search(RATIO, ADVANTAGE.abs(), target=0.4, measure=measure) == still._replace(share=1.0)
    assert search(RATIO, ADVANTAGE * 0, target=0.4, measure=measure) == still._replace(share=1.0)
    end = search(RATIO, -ADVANTAGE.abs(), target=0.4, measure=measure)
    assert end == BalancedBounds(0.9, 3.0, 0.0, 51)


@pytest.mark.parametrize("bounds", [(0.6, 1.2), (0.69, 1.31), (0.9, 3.0)])
def test_gradient_measure_is_what_autograd_lets_through(bounds):
    """d/d(log r) of a token is r A where it is not clipped, else 0; the bounds themselves are not clipped."""
    logp = RATIO.log().requires_grad_()
    # Move the ratios off the bounds, because `minimum` halves the gradient at a tie.
    inside = RATIO + 1e-9 * ADVANTAGE.neg()
    clipped_surrogate(
        inside.detach() * (logp - logp.detach()).exp(), ADVANTAGE, low=1 - bounds[0], high=bounds[1] - 1
    ).sum().backward()
    plus, minus = balance_sums(RATIO, ADVANTAGE, torch.ones(12), [bounds], measure="gradient")[0].tolist()
    assert plus == pytest.approx(logp.grad[8:].sum().item(), abs=1e-7)
    assert minus == pytest.approx(-logp.grad[:8].sum().item(), abs=1e-7)


def test_order_of_the_released_program_is_low_first():
    path = balance_path(**PUBLISHED, order="code")
    assert path[:2] == [(0.6, 1.2), (0.62, 1.2)]
    assert path[15:17] == [(0.9, 1.2), (0.9, 1.25)]
    assert path[-1] == (0.9, 3.0)
    assert len(path) == 1 + 15 + 36


def test_target_of_the_released_program():
    """S+/S- >= x holds exactly where S+/(S+ + S-) >= x/(1 + x)."""
    path = balance_path(**PUBLISHED)
    sums = balance_sums(RATIO, ADVANTAGE, torch.ones(12), path, measure="gradient")
    for x in (0.3, 2 / 3, 1.0, 1.5):
        first = next((i for i, (p, n) in enumerate(sums.tolist()) if p / n >= x), len(path) - 1)
        assert choose_bounds(sums, path, target=x / (1 + x)).moves == first


@pytest.mark.parametrize("measure", ["value", "gradient"])
def test_parts_of_a_batch_give_the_bounds_of_the_whole(measure):
    """Ranks and micro-batches hold different tokens; only the sums are exchanged."""
    ratio, advantage = doubles(RNG.lognormal(0, 0.5, 101)), doubles(RNG.normal(-0.2, 1, 101))
    weight, path = doubles(RNG.uniform(0, 1, 101)), balance_path(**PUBLISHED)
    whole = balance_sums(ratio, advantage, weight, path, measure=measure)
    parts = [
        balance_sums(ratio[part], advantage[part], weight[part], path, measure=measure)
        for part in (slice(0, 40), slice(40, 40), slice(40, 101))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)
    for target in (0.35, 0.45, 0.55):
        together = choose_bounds(whole, path, target=target)
        assert choose_bounds(sum(parts), path, target=target)[:2] == together[:2]
    alone = [choose_bounds(part, path, target=0.45) for part in (parts[0], parts[2])]
    # Without the exchange, the ranks would choose different bounds.
    assert alone[0] != alone[1]


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="high: needs start <= stop"):
        balance_path(**PUBLISHED | {"high": (3.0, 1.2)})
    with pytest.raises(ValueError, match="low: needs start <= stop"):
        balance_path(**PUBLISHED | {"low_step": 0.0})
    with pytest.raises(ValueError, match="got 2 for 1 positions"):
        choose_bounds(torch.ones(2, 2), [(0.8, 1.2)], target=0.4)
    with pytest.raises(ValueError, match="must be >= 0"):
        lag_bounds(torch.zeros(1), low=0.2, high=0.2, contraction=-0.1)


def test_fixed_bounds_are_the_ppo_clip():
    """Bounds fixed at 0.8 and 1.2 give the gradient of the surrogate with clip 0.2."""
    fixed = {"low": (0.8, 0.8), "high": (1.2, 1.2)}
    found = search(RATIO, ADVANTAGE, target=0.9, measure="gradient", **fixed)
    assert found[:2] == (0.8, 1.2)
    grads = []
    for low, high in ((0.2, 0.2), (1 - found.low, found.high - 1)):
        ratio = RATIO.clone().requires_grad_()
        clipped_surrogate(ratio, ADVANTAGE, low=low, high=high).sum().backward()
        grads.append(ratio.grad)
    assert torch.equal(*grads)
    assert (grads[0] == 0).sum() == 4 + 3  # .5 .55 .62 .69 and 1.31 1.78 2.57


@pytest.mark.parametrize("target", [0.0, 0.4, 1.0])
def test_equal_policies_give_the_reinforce_gradient_whatever_the_bounds(target):
    logp = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    found = search(logp.exp(), ADVANTAGE, target=target, measure="gradient")
    clipped_surrogate(logp.exp(), ADVANTAGE, low=1 - found.low, high=found.high - 1).sum().backward()
    assert torch.equal(logp.grad, ADVANTAGE)


# --- HAPO -----------------------------------------------------------------------------------------------------

ENTROPY = doubles([0.05, 0.1, 0.2, 0.4, 1.6])


def test_entropy_signal_by_hand():
    """log(H / .4) = -log 8, -log 4, -log 2, 0, log 4; tokens of low entropy keep a negative sign."""
    signal = entropy_signal(ENTROPY, quantile=0.8)
    assert signal.tolist() == pytest.approx([-1, -2 / 3, -1 / 3, 0, 1])
    low, high = hapo_bounds(signal, low=0.2, high=0.2)
    assert low.tolist() == pytest.approx([0.4, 1 / 3, 0.8 / 3, 0.2, 0.2])
    assert high.tolist() == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.4])


def slow_signal(entropies, quantile, epsilon):
    """Return the signal by the published formula, with its scale (root mean square around the quantile)."""
    logs = [math.log(max(h, epsilon)) for h in entropies]
    pivot = sorted(logs)[round(quantile * (len(logs) - 1))]
    scale = math.sqrt(sum((x - pivot) ** 2 for x in logs) / len(logs))
    h = [(x - pivot) / scale for x in logs]
    return [x / max(h) if x > 0 else x / abs(min(h)) for x in h]


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
def test_entropy_signal_equals_the_loop(quantile):
    entropies = np.append(RNG.gamma(0.5, 0.5, 200), [0.0, -1e-9])
    got = entropy_signal(doubles(entropies), quantile=quantile, epsilon=1e-6)
    np.testing.assert_allclose(got, slow_signal(entropies, quantile, 1e-6), atol=1e-12)


def test_entropy_signal_without_contrast_is_zero():
    assert entropy_signal(torch.full((3,), 0.7)).tolist() == [0, 0, 0]
    assert entropy_signal(torch.zeros(2)).tolist() == [0, 0]
    assert entropy_signal(torch.tensor([])).tolist() == []


def test_hapo_redistribute_equals_the_cases():
    advantage, ratio = RNG.normal(size=300), RNG.lognormal(0, 0.2, 300)
    signal = RNG.uniform(-1, 1, 300)
    got = hapo_redistribute(doubles(advantage), doubles(ratio), doubles(signal), low=0.2, high=0.28)
    for i, (a, r, h) in enumerate(zip(advantage, ratio, signal, strict=True)):
        left = 0.2 * (1 - h) if h <= 0 else 0.2
        right = 0.28 * (1 + h) if h > 0 else 0.28
        neutral = 1 - left / 2 <= r <= 1 + right / 2
        changes = not neutral if h > 0 else neutral
        assert got[i].item() == pytest.approx(a * (1 + h) if changes else a)


def test_without_signal_hapo_is_clip_higher():
    ratio, advantage = doubles(RNG.lognormal(0, 0.4, 100)).requires_grad_(), doubles(RNG.normal(size=100))
    zero = torch.zeros(100, dtype=torch.float64)
    low, high = hapo_bounds(zero, low=0.2, high=0.28)
    same = hapo_redistribute(advantage, ratio, zero, low=0.2, high=0.28)
    assert torch.equal(same, advantage)
    assert not same.requires_grad
    (got,) = torch.autograd.grad(clipped_surrogate(ratio, same, low=low, high=high).sum(), ratio)
    (plain,) = torch.autograd.grad(clipped_surrogate(ratio, advantage, low=0.2, high=0.28).sum(), ratio)
    assert torch.equal(got, plain)


# --- by lag ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lag", "contraction"), [(0.0, 0.7), (5.0, 0.0)])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28)])
def test_lag_bounds_without_lag_are_plain_ppo(lag, contraction, low, high):
    values, grads = [], []
    ratios, advantage = doubles(RNG.lognormal(0, 0.4, 200)), doubles(RNG.normal(size=200))
    by_lag = lag_bounds(
        torch.full((200,), lag, dtype=torch.float64), low=low, high=high, contraction=contraction
    )
    for bounds in ((low, high), by_lag):
        ratio = ratios.clone().requires_grad_()
        value = clipped_surrogate(ratio, advantage, low=bounds[0], high=bounds[1])
        value.sum().backward()
        values.append(value.detach())
        grads.append(ratio.grad)
    assert torch.equal(*values)
    assert torch.equal(*grads)
    assert 20 < (grads[0] == 0).sum() < 180


def test_lag_bounds_by_hand():
    """Contraction 1/2: lags 0, 2, 6 divide by 1, 2, 4. A ratio of 1.12 is inside 0.28 and 0.14, not 0.07."""
    low, high = lag_bounds(doubles([0, 2, 6]), low=0.2, high=0.28, contraction=0.5)
    assert low.tolist() == pytest.approx([0.2, 0.1, 0.05])
    assert high.tolist() == pytest.approx([0.28, 0.14, 0.07])
    ratio = doubles([1.12, 1.12, 1.12]).requires_grad_()
    clipped_surrogate(ratio, torch.ones(3, dtype=torch.float64), low=low, high=high).sum().backward()
    assert ratio.grad.tolist() == [1, 1, 0]


# --- entropy --------------------------------------------------------------------------------------------------

COUNTS = np.array([10, 7, 5, 4, 3, 1])
TABLE_ADVANTAGE = np.array([0.9, -0.4, 0.2, -1.1, 0.7, 1.6])
TABLE_ACTIVE = np.array([True, True, True, False, True, True])


def entropy_after(logits, step):
    p = np.exp(logits + step - np.log(np.exp(logits + step).sum()))
    return -(p * np.log(p)).sum()


@pytest.mark.parametrize("natural", [True, False])
def test_entropy_change_predicts_a_step_of_a_softmax(natural):
    """Six actions occur in proportion to their probabilities, so the tokens' covariance is the one under pi.

    A natural gradient step adds eta · A X to the logits. A plain step adds eta · pi (A X - E[A X]), the
    gradient of E[A X log pi]; the rule then holds with this term in place of A X.
    """
    p = COUNTS / COUNTS.sum()
    driven = TABLE_ADVANTAGE * TABLE_ACTIVE
    direction = driven if natural else p * (driven - (p * driven).sum())
    eta = 1e-4
    before, after = (entropy_after(np.log(p), sign * eta * direction) for sign in (-1, 1))
    tokens = np.repeat(np.arange(6), COUNTS)
    advantage = TABLE_ADVANTAGE if natural else direction
    active = TABLE_ACTIVE if natural else np.ones(6, dtype=bool)
    predicted = entropy_change(
        doubles(np.log(p)[tokens]), doubles(advantage[tokens]), torch.tensor(active[tokens])
    ).item()
    assert predicted == pytest.approx((after - before) / (2 * eta), rel=1e-6)
    step = after - entropy_after(np.log(p), 0.0)
    # The error of a single step is of second order.
    assert eta * predicted == pytest.approx(step, rel=3e-3)


def test_clipping_a_likely_negative_token_takes_its_entropy_away():
    """Pushing down the likeliest action raises the entropy; when the token is clipped, it does not."""
    logp = doubles([0.7, 0.1, 0.1, 0.1]).log()
    advantage = doubles([-1.0, 0, 0, 0])
    free = entropy_change(logp, advantage, torch.ones(4, dtype=torch.bool))
    cut = entropy_change(logp, advantage, torch.tensor([False, True, True, True]))
    assert free > 0
    assert cut == 0


def test_entropy_quadrants_by_hand():
    """Four likely and four unlikely tokens: log p is ±x around its mean, x = log(4)/2.

    Each token contributes x/8 times its advantage, with a minus sign above the mean. The clipped token, the
    third, contributes nothing.
    """
    logp = doubles([0.2] * 4 + [0.8] * 4).log()
    advantage = doubles([2, 1, 5, -3, 1, 0, -2, -4])
    active = torch.tensor([True, True, False] + [True] * 5)
    parts = entropy_quadrants(logp, advantage, active)
    unit = math.log(4) / 2 / 8
    assert [float(p) for p in parts] == pytest.approx([3 * unit, -unit, -3 * unit, 6 * unit])
    assert sum(parts).item() == pytest.approx(entropy_change(logp, advantage, active).item())


def test_entropy_change_equals_the_covariance():
    logp, advantage = -RNG.exponential(1, 500), RNG.normal(size=500)
    active = RNG.random(500) < 0.7
    expected = -np.cov(logp, advantage * active, bias=True)[0, 1]
    got = entropy_change(doubles(logp), doubles(advantage), torch.tensor(active))
    assert got.item() == pytest.approx(expected)
    shifted = entropy_change(doubles(logp), doubles(advantage) + 3.0, torch.ones(500, dtype=torch.bool))
    plain = entropy_change(doubles(logp), doubles(advantage), torch.ones(500, dtype=torch.bool))
    assert shifted.item() == pytest.approx(plain.item())


def test_no_tokens_drive_no_entropy():
    nothing = torch.zeros(0)
    assert entropy_change(nothing, nothing, nothing.bool()).item() == 0
    assert [p.item() for p in entropy_quadrants(nothing, nothing, nothing.bool())] == [0, 0, 0, 0]


def test_quadrants_are_split_at_the_median_not_the_mean():
    """One very unlikely token pulls the mean to -2.5; -0.6 is above the mean, but below the median, -0.4."""
    logp = doubles([-11.0, -0.6, -0.4, -0.3, -0.2])
    parts = entropy_quadrants(logp, doubles([0, 1, 0, 0, 0]), torch.ones(5, dtype=torch.bool))
    assert parts.low_positive.item() == pytest.approx(-(-0.6 + 2.5) / 5)
    assert parts.high_positive.item() == 0


def test_certain_tokens_are_not_unlikely_ones():
    """Where most tokens have probability 1, the median is 0, and only tokens below it count as unlikely."""
    parts = entropy_quadrants(
        torch.tensor([0.0, 0.0, 0.0, -2.0]), torch.ones(4), torch.ones(4, dtype=torch.bool)
    )
    assert parts.low_positive.item() == pytest.approx(1.5 / 4)
    assert parts.high_positive.item() == pytest.approx(-1.5 / 4)
