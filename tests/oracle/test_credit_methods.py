"""Test further recipes of credit as shipped, against slow twins and the numbers of the papers' cards.

For each recipe a test shows that its named part changes a gradient.
"""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from launch.run_file.load import load
from learner.advantages import Estimates, Quantiles, assign_advantages, risk_advantages
from learner.algorithms.advantages import next_quantile, risk_advantage, share_of_paper
from learner.algorithms.entropy import covariance_mask, entropy_multiplier, gradient_keeping_surrogate
from learner.algorithms.penalties import regression_surrogate
from learner.algorithms.surrogates import dual_clipped_surrogate
from learner.replay.batch import mix, remember
from learner.replay.table import replay_table
from learner.rewards import composed, cooling_bonus, step_value
from learner.settings.advantages import RiskAdvantage
from learner.trajectory import Unit
from learner.update.objective import Adaptive, Tokens, make_objective
from protocol.messages.episodes import Reward, TurnMark
from tests.oracle.test_credit_recipes import FILES, firsts_of, gradient, group_of, normal, turns_of
from tests.trajectories import make_turns

RNG = np.random.default_rng(53)


def learner_of(name):
    return load(FILES[name]).learner


def changed(plain, own):
    """Assert that two gradients differ in more than their length."""
    assert (own - plain).norm() > 0.02 * plain.norm()
    assert torch.nn.functional.cosine_similarity(own.flatten(), plain.flatten(), dim=0) < 0.9999


# --- ARPO for GUI agents ------------------------------------------------------------------------------------


def test_arpo_gui_by_hand():
    """2505.16282: eight failures and a stored success give 2.4749 and -.3536; a group with a success stays."""
    learner = learner_of("arpo-gui")
    table = replay_table(learner)
    prompt = np.array([3, 4], dtype=np.int32)

    def group(name, returns):
        members = [make_turns(f"{name}{i}", [{"score": r}], group=name) for i, r in enumerate(returns)]
        return Unit(name, name, [
            replace(t, token_ids=np.concatenate([prompt, t.token_ids[2:]])) for t in members
        ])  # fmt: skip

    failed, solved = group("f", [0.0] * 8), group("s", [1.0] + [0.0] * 7)
    rng = np.random.default_rng(0)
    assert [t.trajectory_id for t in mix(table, [failed], step=0, version=0, rng=rng)] == [
        t.trajectory_id for t in failed.trajectories
    ], "nothing is stored yet"
    remember(table, [solved], step=0)
    batch = mix(table, [failed, solved], step=1, version=0, rng=rng)
    advantages = assign_advantages(learner.algorithm, batch[:8]).advantage.reshape(8, -1)[:, -1]
    np.testing.assert_allclose(sorted(advantages), [-0.353553] * 7 + [2.474874], atol=1e-5)
    assert [t.trajectory_id for t in batch[8:]] == [t.trajectory_id for t in solved.trajectories]
    remember(table, [Unit("f", "f", batch[:8])], step=1)
    assert table.inserted == 1, "a stored success is not stored again"
    # Without the replay the failed group has no gradient at all.
    assert gradient("arpo-gui", failed.trajectories).norm() == 0
    assert gradient("arpo-gui", batch[:8]).norm() > 1


# --- XRPO ---------------------------------------------------------------------------------------------------


def slow_novelty(returns, likely, advantages):
    """The card's F6 by loops: s_i less the group's mean, and a bonus of at most half the advantage."""
    mean = sum(likely) / len(likely)
    return [
        a + (min(max(2.5 * (1 - math.exp(s - mean)), 0.0), 0.5 * a) if r > 0 and a > 0 else 0.0)
        for r, s, a in zip(returns, likely, advantages, strict=True)
    ]


def answered(name, reward, logp, group="g0", length=2):
    t = make_turns(name, [{"score": reward}], group=group, lengths=[length])
    return replace(t, logp_behaviour=np.where(t.action_mask, logp, 0).astype(np.float32))


def test_novelty_by_hand():
    """2510.06672: A = 1 and s below the mean by .05, .1, .3 give bonuses .1219, .2379 and .5; above it none."""
    for below, bonus in ((0.05, 0.1219), (0.1, 0.2379), (0.3, 0.5), (0.0, 0.0), (-0.4, 0.0)):
        members = [answered("t", 1.0, -2 - below), answered("u", 0.0, -2 + below)]
        np.testing.assert_allclose(firsts_of("xrpo-novelty", members), [1 + bonus, -1.0], atol=1e-4)


def test_novelty_against_a_loop_and_of_right_answers_alone():
    returns = [1.0, 1.0, 0.0, 1.0, 0.0]
    likely = RNG.uniform(-3, -1, 5).astype(np.float32).astype(float).tolist()
    pairs = zip(returns, likely, strict=True)
    members = [answered(str(i), r, s, length=int(RNG.integers(1, 5))) for i, (r, s) in enumerate(pairs)]
    expected = slow_novelty(returns, likely, normal(returns))
    np.testing.assert_allclose(firsts_of("xrpo-novelty", members), expected, atol=1e-6)
    solved = [replace(t, rewards=members[0].rewards) for t in members]
    assert firsts_of("xrpo-novelty", solved) == [0.0] * 5, "nothing to learn where all are right"


def test_novelty_changes_the_gradient():
    members = [answered(f"{i}", float(i % 2), -1 - i) for i in range(6)]
    changed(gradient("grpo", members), gradient("xrpo-novelty", members))


# --- SubPO --------------------------------------------------------------------------------------------------


def test_coverage_gains_telescope_and_nothing_is_gained_twice():
    """2307.13372: a state again gives 0, and the sum of the gains is F of all states without the first."""
    for _ in range(9):
        states = [str(s) for s in RNG.integers(0, 4, int(RNG.integers(1, 9)))]
        (t,) = composed(learner_of("subpo").reward, [make_turns("t", [{}] * len(states), anchors=states)])
        gains = {r.turn: r.value for r in t.rewards}
        assert sum(gains.values()) == pytest.approx(0.1 * (len(set(states)) - 1))
        assert {2 * k - 1 for k, s in enumerate(states) if k and s not in states[:k]} == set(gains)


def test_subpo_by_hand():
    """Ways x y x and x y z: gains .1 0 0 and .1 .1 0, returns to go .1 0 0 and .2 .1 0, means .15 .05 0."""
    members = [
        make_turns("t", [{}] * 3, anchors=["x", "y", "x"]),
        make_turns("u", [{}] * 3, anchors=["x", "y", "z"]),
    ]
    np.testing.assert_allclose(
        turns_of("subpo", members), [[-0.05, -0.05, 0.0], [0.05, 0.05, 0.0]], atol=1e-12
    )


def test_coverage_changes_the_gradient():
    members = [
        make_turns(
            f"{i}", [{}, {}, {"answer": float(i % 2)}], anchors=[str(s) for s in RNG.integers(0, 3, 3)]
        )
        for i in range(6)
    ]
    without = [replace(t, marks=[]) for t in members]
    changed(gradient("subpo", without), gradient("subpo", members))
    changed(gradient("grpo", members), gradient("subpo", members))


# --- AEPO (agentic) -----------------------------------------------------------------------------------------


def test_a_clipped_token_keeps_its_gradient():
    """2510.14545: A = 1, r = 1.5, high .2: value 1.2 and gradient 1.2, where PPO's is 0. Elsewhere it is PPO's."""
    for r, a, value, slope in [
        (1.5, 1.0, 1.2, 1.2), (1.1, 1.0, 1.1, 1.1), (0.5, 1.0, 0.5, 0.5),
        (0.5, -1.0, -0.8, 0.0), (1.5, -1.0, -1.5, -1.5), (9.0, -1.0, -3.0, 0.0),
    ]:  # fmt: skip
        logp = torch.tensor([math.log(r)], dtype=torch.float64, requires_grad=True)
        advantage = torch.tensor([a], dtype=torch.float64)
        kept = gradient_keeping_surrogate(logp.exp(), advantage, low=0.2, high=0.2, ceiling=3.0)
        kept.value.sum().backward()
        assert (kept.value.item(), logp.grad.item()) == pytest.approx((value, slope))
        plain = dual_clipped_surrogate(logp.detach().exp(), advantage, low=0.2, high=0.2, ceiling=3.0)
        assert plain.value.item() == pytest.approx(value)
        assert kept.clipped.item() == (slope == 0)


def test_advantages_by_entropy_by_hand():
    """2510.14545: entropies .1 .2 .3 .6 give .7862 .8931 1 1.3207 with divisor G; the program divides by G - 1."""
    entropies = [0.1, 0.2, 0.3, 0.6]
    got = entropy_multiplier(torch.tensor(entropies, dtype=torch.float64), coefficient=0.2)
    np.testing.assert_allclose(1 + (got - 1) * math.sqrt(4 / 3), [0.7862, 0.8931, 1.0, 1.3207], atol=1e-4)
    mean, deviation = statistics.fmean(entropies), statistics.stdev(entropies)
    np.testing.assert_allclose(got, [1 + 0.2 * (h - mean) / deviation for h in entropies])
    assert float(got.mean()) == pytest.approx(1.0)
    assert entropy_multiplier(torch.full((3,), 0.7), coefficient=0.2).tolist() == [1.0] * 3


@pytest.mark.parametrize("part", ["keep_gradient", "advantage_by_entropy"])
def test_each_part_of_aepo_changes_the_gradient(part):
    algorithm = learner_of("aepo-agentic").algorithm
    off = {
        "keep_gradient": {"surrogate": algorithm.surrogate.model_copy(update={"keep_gradient": False})},
        "advantage_by_entropy": {"advantage_by_entropy": 0.0},
    }[part]
    n, row = 8, torch.zeros(8, dtype=torch.int64)
    logp = torch.linspace(-2, -0.5, n, dtype=torch.float64)
    grads = []
    for config in (algorithm, algorithm.model_copy(update=off)):
        current = (logp + torch.linspace(-0.5, 0.5, n)).requires_grad_()
        multiplier = entropy_multiplier(torch.linspace(0.1, 2, n), coefficient=config.advantage_by_entropy)
        tokens = Tokens(
            logp, advantage=torch.tensor([1.0, -1.0] * 4), weight=torch.full((n,), 1 / n), lag=torch.zeros(n),
            sequence=row, turn=row, entropy_multiplier=multiplier if config.advantage_by_entropy else None,
        )  # fmt: skip
        loss, _ = make_objective(config)(tokens, Adaptive(), current, torch.ones(n))
        loss.backward()
        grads.append(current.grad)
    changed(grads[1], grads[0])


# --- FAPO ---------------------------------------------------------------------------------------------------


def test_fapo_by_hand():
    """2510.22543: 1, 1, 0 (flawed), -1 has mean 1/4, so flawed is bad; 1, 0, -1, -1 has mean -1/4, so it is good."""
    sound, flawed, wrong = (
        {"answer": 1.0, "step": 0.2},
        {"answer": 1.0, "step": 0.1},
        {"answer": 0.0, "step": 0.2},
    )
    for rows, values in (
        ([sound, sound, flawed, wrong], [1.0, 1.0, 0.0, -1.0]),
        ([sound, flawed, wrong, wrong], [1.0, 0.0, -1.0, -1.0]),
    ):
        members = group_of("a", rows)
        valued = composed(learner_of("fapo-rule").reward, members)
        assert [t.return_ for t in valued] == values
        np.testing.assert_allclose(firsts_of("fapo-rule", members), normal(values), atol=1e-9)
    assert normal([1.0, 1.0, 0.0, -1.0])[2] < 0 < normal([1.0, 0.0, -1.0, -1.0])[1]


def test_flaws_change_the_gradient():
    rows = [{"answer": float(i % 2), "step": 0.1 * (i % 3)} for i in range(6)]
    members = group_of("a", rows)
    even = group_of("a", [{**row, "step": 0.2} for row in rows])
    changed(gradient("fapo-rule", even), gradient("fapo-rule", members))


# --- RiskPO -------------------------------------------------------------------------------------------------


def test_risk_by_hand():
    """2510.00911: S = 0 1 2 3 5, quantiles 1 and 3 at levels .2 and .8."""
    settings = {"quantiles": (1.0, 3.0), "levels": (0.2, 0.8)}
    scores = [0, 1, 2, 3, 5]
    middle = risk_advantage(scores, **settings, mix=0.0)
    np.testing.assert_allclose(middle, [0, 0, 5 / 3, 10 / 3, 10 / 3])
    natural = risk_advantage(scores, **settings, mix=0.0, natural_baseline=True)
    np.testing.assert_allclose(natural, [-10 / 3, -10 / 3, -5 / 3, 0, 0])
    tail = risk_advantage(scores, **settings, mix=1e12)
    np.testing.assert_allclose(tail, [-5, 0, 0, 0, 0], atol=1e-9)
    np.testing.assert_allclose(risk_advantage(scores, **settings, mix=1.5), [-3, 0, 2 / 3, 4 / 3, 4 / 3])


def test_a_running_quantile_rests_where_the_share_below_it_is_its_level():
    values, q = RNG.normal(size=4000), 5.0
    for _ in range(2000):
        q = next_quantile(q, RNG.choice(values, 64), level=0.2, rate=0.1)
    assert float((values < q).mean()) == pytest.approx(0.2, abs=0.06)
    assert next_quantile(1.0, [0, 2, 2, 2, 2], level=0.2, rate=0.1) == 1.0


def test_shares_of_a_paper_add_up_to_1():
    for _ in range(9):
        assert share_of_paper(RNG.normal(size=4)).sum() == pytest.approx(1.0)
    assert share_of_paper([0.0, 0.0]).tolist() == [0.5, 0.5]


def slow_riskpo(rows, quantiles, bundle=4, levels=(0.2, 0.8), mix=1.5):
    """The card's formulas by loops; rows[group][member] are rewards."""
    result = []
    for first in range(0, len(rows), bundle):
        tasks = rows[first : first + bundle]
        papers = list(zip(*tasks, strict=True))
        sums = [sum(paper) for paper in papers]
        deviation = statistics.stdev(sums)
        own = [[0.0] * len(papers) for _ in tasks]
        for j, paper in enumerate(papers):
            s, (low, high) = sums[j], quantiles
            middle = (max(s - low, 0) - max(s - high, 0)) / (levels[1] - levels[0])
            tail = -max(low - s, 0) / levels[0]
            a = (mix * tail + middle) / (mix + 1) / (deviation + 1e-6)
            differences = [r - statistics.fmean(task) for r, task in zip(paper, tasks, strict=True)]
            for i, d in enumerate(differences):
                own[i][j] = a * max(-7.0, min(7.0, d / sum(differences)))
        result += own
    return result


def test_riskpo_against_loops():
    config = learner_of("riskpo").algorithm.advantage
    assert isinstance(config, RiskAdvantage)
    rows = RNG.random((8, 5)).tolist()
    members = [t for g, row in enumerate(rows) for t in group_of(f"g{g}", [{"r": r} for r in row])]
    got, after = risk_advantages(config, members, Quantiles(1.8, 2.2))
    np.testing.assert_allclose(got.reshape(8, 5), slow_riskpo(rows, (1.8, 2.2)), rtol=1e-6)
    sums = [sum(row[j] for row in part) for part in (rows[:4], rows[4:]) for j in range(5)]
    below = [sum(s < q for s in sums) / 10 for q in (1.8, 2.2)]
    assert after == pytest.approx((1.8 + 0.1 * (0.2 - below[0]), 2.2 + 0.1 * (0.8 - below[1])))
    _, first = risk_advantages(config, members, None)
    low, high = np.quantile(sums, [0.2, 0.8])
    assert first == pytest.approx((low, high), abs=0.1), "the first batch takes its own"


def test_riskpo_with_members_that_are_missing():
    """A bundle has as many papers as its smallest group has members; the others have no advantage."""
    config = learner_of("riskpo").algorithm.advantage
    rows = [[{"r": float(r)} for r in RNG.random(n)] for n in (3, 2, 3, 3)]
    members = [t for g, row in enumerate(rows) for t in group_of(f"g{g}", row)]
    got, _ = risk_advantages(config, members, Quantiles(1.0, 3.0))
    last = [2, 7, 10]
    assert (got[last] == 0).all()
    assert (np.delete(got, last) != 0).all()
    equal = [t for g in range(4) for t in group_of(f"g{g}", [{"r": 1.0}] * 3)]
    assert risk_advantages(config, equal, None)[0].tolist() == [0.0] * 12


def test_risk_changes_the_gradient():
    config = learner_of("riskpo").algorithm.advantage
    members = [t for g in range(4) for t in group_of(f"g{g}", [{"r": float(r)} for r in RNG.random(5)])]
    by_risk = risk_advantages(config, members, None)[0]
    plain = np.array(firsts_of("grpo", members))
    cosine = by_risk @ plain / np.linalg.norm(by_risk) / np.linalg.norm(plain)
    assert cosine < 0.99, "the gradient is linear in the advantages"


# --- DAPO (direct advantages) ---------------------------------------------------------------------------------


def regression_gradient(logp, behaviour, advantage, turn, beta):
    current = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    value = regression_surrogate(
        current, torch.tensor(behaviour, dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64),
        torch.tensor(turn), beta=beta,
    ).value  # fmt: skip
    value.sum().backward()
    return value.detach().numpy(), current.grad.numpy()


def test_regression_by_hand():
    """2412.18279: where both policies agree the gradient is A / beta; it is 0 at the log-ratio A / beta."""
    behaviour, advantage, turn = [-1.0, -2.0, -0.5], [0.25, 0.5, -0.4], [0, 0, 1]
    _, gradient = regression_gradient(behaviour, behaviour, advantage, turn, 0.5)
    np.testing.assert_allclose(gradient, [1.5, 1.5, -0.8])
    value, gradient = regression_gradient([-0.2, -1.3, -1.3], behaviour, advantage, turn, 0.5)
    np.testing.assert_allclose([value, gradient], np.zeros((2, 3)), atol=1e-12)


def test_regression_against_loops():
    n = 9
    turn = sorted(RNG.integers(0, 4, n).tolist())
    logp, behaviour, advantage = (RNG.normal(size=n).tolist() for _ in range(3))
    value, gradient = regression_gradient(logp, behaviour, advantage, turn, 2.0)
    for t in set(turn):
        places = [i for i in range(n) if turn[i] == t]
        rest = sum(logp[i] - behaviour[i] for i in places) - sum(advantage[i] for i in places) / 2.0
        assert value[places].sum() == pytest.approx(-0.5 * rest**2)
        np.testing.assert_allclose(gradient[places], -rest)


def test_the_advantages_of_a_turn_add_up_to_the_rise_of_the_value():
    """Rewards 0 and 1 of two turns, values v of the four action tokens: V(after) - V(before) + r."""
    algorithm = learner_of("dapo-direct").algorithm
    t = make_turns("t", [{"step": 0.0}, {"answer": 1.0}])
    values = np.where(t.action_mask, RNG.random(len(t)), 0.0)
    t = replace(t, correct=True)
    credit = assign_advantages(algorithm, [t], Estimates(values, np.ones(len(t))), window_tokens=99)
    before = [values[turn.start] for turn in t.turns if turn.action]
    sums = [credit.advantage[turn.start : turn.end].sum() for turn in t.turns if turn.action]
    assert sums == pytest.approx([before[1] - before[0], 1.0 - before[1]])
    assert credit.policy[t.action_mask].all()


def test_the_regression_changes_the_gradient():
    """The pull depends on where a token was sampled, which REINFORCE with these advantages does not."""
    logp, advantage, turn = RNG.normal(size=8).tolist(), RNG.normal(size=8).tolist(), [0, 0, 1, 1, 2, 2, 3, 3]
    _, own = regression_gradient(logp, (np.array(logp) + RNG.normal(size=8)).tolist(), advantage, turn, 1.0)
    changed(torch.tensor(advantage, dtype=torch.float64), torch.from_numpy(own))


# --- RAPO (Fathom) ----------------------------------------------------------------------------------------------


def labelled(name, labels, right, form=0.0, group="g0"):
    rewards = [{}] * len(labels) + [{"answer": float(right), "step": form}]
    marks = [TurnMark("call", 2 * k + 1, label) for k, label in enumerate([*labels, "none"])]
    return replace(make_turns(name, rewards, group=group), marks=marks)


def test_step_values_of_the_card():
    """2509.24107: right with rho .3 and .8 is .7 and .5; wrong by dS and dQ: .4, .15, and -.1 for dS = -4."""
    config = learner_of("rapo").reward.steps
    for labels, right, expected in [
        (["redundant_query"] * 3 + ["search"] * 7, True, 0.7),
        (["redundant_query"] * 4 + ["redundant_search"] * 4 + ["exploration"] * 2, True, 0.5),
        ([], True, 1.0),
        (["search"] * 8 + ["verification"] * 16, False, 0.4),
        (["search"] * 20 + ["exploration"] * 40, False, 0.4),
        (["search"] * 4 + ["exploration"] * 4, False, 0.15),
        (["redundant_search"] * 4, False, -0.1),
        (["search"] * 5 + ["redundant_search"] * 5, False, 0.0),
    ]:
        t = labelled("t", labels, right)
        assert step_value(config, t) == pytest.approx(expected), labels
        (valued,) = composed(
            learner_of("rapo").reward, [replace(t, rewards=[*t.rewards, Reward("step", 1, 1.0)])]
        )
        assert valued.return_ == pytest.approx(expected + 0.1), "the form has the weight .1"


def test_rapo_scales_by_informative_groups_and_rescues_failed_ones():
    """2509.24107: 4 groups, 1 informative: factor 4. A stored right answer gives a failed group a signal."""
    learner = learner_of("rapo")
    mixed = [labelled(f"m{i}", ["exploration"], i == 0, group="m") for i in range(2)]
    equal = [labelled(f"{g}{i}", ["exploration"], False, group=g) for g in "xyz" for i in range(2)]
    valued = [
        t for g in "mxyz" for t in composed(learner.reward, [t for t in mixed + equal if t.group_id == g])
    ]
    advantages = assign_advantages(learner.algorithm, valued).advantage
    assert np.abs(advantages).max() == pytest.approx(4.0, abs=1e-4)
    table = replay_table(learner)
    units = [Unit(g, g, [t for t in valued if t.group_id == g]) for g in "mx"]
    same = [
        replace(t, token_ids=np.concatenate([[7, 7], t.token_ids[2:]]).astype(np.int32))
        for u in units
        for t in u.trajectories
    ]
    units = [Unit(g, g, [t for t in same if t.group_id == g]) for g in "mx"]
    remember(table, units[:1], step=0)
    batch = mix(table, units[1:], step=1, version=0, rng=np.random.default_rng(0))
    assert sorted(t.replayed for t in batch) == [False, True]
    assert assign_advantages(learner.algorithm, batch).advantage.any()
    assert not assign_advantages(learner.algorithm, units[1].trajectories).advantage.any()


def test_labels_change_the_gradient():
    words = ["search", "exploration", "redundant_query"]
    members = [labelled(f"{i}", [words[k] for k in RNG.integers(0, 3, 3)], i % 2) for i in range(6)]
    without = [replace(t, marks=[]) for t in members]
    changed(gradient("rapo", without), gradient("rapo", members))


# --- SPEAR ------------------------------------------------------------------------------------------------------


def test_the_bonus_for_calls_cools_down():
    """2509.22601: mu is 1, .5 and 0 at versions 0, 50 and 100; ten calls or more are worth 1 at the start."""
    config = learner_of("spear").reward.bonus
    assert [round(cooling_bonus(config, 10, v), 9) for v in (0, 50, 100, 1000)] == [1.0, 0.5, 0.0, 0.0]
    assert [cooling_bonus(config, m, 0) for m in (0, 3, 99)] == pytest.approx([0.0, 0.3, 1.0])
    members = [with_calls("t", 0.0, 4), with_calls("u", 0.0, 0)]
    early, late = (composed(learner_of("spear").reward, members, updates=v) for v in (0, 100))
    assert [t.return_ for t in early] == pytest.approx([0.4, 0.0])
    assert [t.return_ for t in late] == [0.0, 0.0]
    changed(
        gradient("spear", [replace(t, marks=[]) for t in mixed_calls()]), gradient("spear", mixed_calls())
    )


def with_calls(name, reward, calls, group="g0"):
    return replace(
        make_turns(name, [{"answer": reward}], group=group), marks=[TurnMark("calls", 1, float(calls))]
    )


def mixed_calls():
    return [with_calls(f"{i}", float(i % 2), 3 * (i % 3)) for i in range(6)]


def test_good_answers_with_calls_are_replayed_at_once_and_forgotten():
    """2509.22601: items count if R > mean of their group and R > median of recent group means."""
    learner = learner_of("spear")
    config = learner.replay.model_copy(update={"fire_at": 3})
    table = replay_table(learner.model_copy(update={"replay": config}))
    rng = np.random.default_rng(0)

    def group(name, pairs):
        return Unit(
            name, name, [with_calls(f"{name}{i}", r, m, group=name) for i, (r, m) in enumerate(pairs)]
        )

    fresh = group("n", [(0.0, 0), (1.0, 0)])
    for name in "ab":
        # The second has no call, the third is below the mean.
        remember(table, [group(name, [(1.0, 2), (1.0, 0), (0.0, 2)])], step=0)
    assert [e.item.trajectory_id for e in table.entries.values()] == ["a0", "b0"]
    assert len(mix(table, [fresh], step=1, version=0, rng=rng)) == 2, "two are not enough"
    remember(table, [group("c", [(0.7, 2), (0.0, 2)])], step=1)
    remember(table, [group("d", [(0.5, 2), (0.0, 2)])], step=1)
    # The median of the means 2/3, 2/3, .35 and .25 is .5083, so d0 does not count: 1, 1 and .7 are left.
    batch = mix(table, [fresh], step=2, version=0, rng=rng, weight=0.5)
    replayed = {t.trajectory_id: t.advantage for t in batch if t.replayed}
    median = statistics.median([2 / 3, 2 / 3, 0.35, 0.25])
    assert replayed == pytest.approx(
        {"a0": 0.5 * (1 - median), "b0": 0.5 * (1 - median), "c0": 0.5 * (0.7 - median)}
    )
    assert (len(table), table.sampled, table.inserted, sum(table.evicted.values())) == (0, 3, 4, 4)
    assert len(mix(table, [fresh], step=3, version=0, rng=rng)) == 2, "the table is empty"
    assert learner.fresh_trajectories == learner.batch_trajectories


def slow_covariances(advantages, logps):
    a, p = statistics.fmean(advantages), statistics.fmean(logps)
    return [(x - a) * (y - p) for x, y in zip(advantages, logps, strict=True)]


def test_tokens_of_high_covariance_are_left_out():
    """2509.22601: at most .02 of all tokens, drawn from those with 1 < cov < 40."""
    advantages, logps = RNG.normal(size=500) * 3, RNG.normal(size=500) * 2
    chosen = np.array([1 < c < 40 for c in slow_covariances(advantages.tolist(), logps.tolist())])
    kept = covariance_mask(advantages, logps, low=1, high=40, share=0.02, rng=np.random.default_rng(1))
    assert (~kept).sum() == 10
    assert chosen[~kept].all()
    everything = covariance_mask(advantages, logps, low=1, high=40, share=1.0, rng=np.random.default_rng(1))
    np.testing.assert_array_equal(everything, ~chosen)
    assert covariance_mask([], [], low=1, high=40, share=1.0, rng=np.random.default_rng(1)).size == 0


def test_a_token_that_is_left_out_has_no_gradient():
    algorithm, row = learner_of("spear").algorithm, torch.zeros(3, dtype=torch.int64)
    current = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    tokens = Tokens(
        current.detach(), advantage=torch.tensor([1.0, 1.0, -1.0]), weight=torch.ones(3), lag=torch.zeros(3),
        sequence=row, turn=row, kept=torch.tensor([1.0, 0.0, 1.0]),
    )  # fmt: skip
    loss, seen = make_objective(algorithm)(tokens, Adaptive(), current, torch.ones(3))
    loss.backward()
    assert current.grad.tolist() == [-1.0, 0.0, 1.0]
    assert seen.clipped.tolist() == [False, True, False]
