"""Test recipes of credit as shipped: hand-worked numbers, slow twins from the cards, and a gradient that changes."""

import math
import statistics
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_turn

from launch.run_file.load import METHODS_FOLDER, load, run_files
from learner.advantages import assign_advantages
from learner.comparisons import anchor_histories
from learner.rewards import composed
from learner.settings.algorithm import AlgorithmConfig
from protocol.messages.episodes import TurnMark
from tests.trajectories import VOCABULARY, make_turns

RNG = np.random.default_rng(47)
ELSEWHERE = {
    "a2fm",
    "epo",
    "arpo-gui",
    "xrpo-novelty",
    "subpo",
    "aepo-agentic",
    "fapo-rule",
    "fapo-judge",
    "riskpo",
    "dapo",
}
"""Recipes of tests/oracle/test_credit_methods.py, and "fapo-judge", of tests/integration/envs/test_judged_answers.py,
"epo", of test_regularisers_against_papers.py, and "a2fm", of test_modes.py."""
NAMES = sorted({path.stem for path in (METHODS_FOLDER / "credit").glob("*.toml")} - ELSEWHERE)
FILES = run_files(METHODS_FOLDER)


def credit(name, trajectories):
    """Return the advantage of every token, as the recipe's learner forms it, and the trajectories it saw."""
    learner = load(FILES[name]).learner
    groups = [list(group) for _, group in groupby(trajectories, key=lambda t: t.group_id)]
    valued = [t for group in groups for t in composed(learner.reward, group)]
    return assign_advantages(learner.algorithm, valued).advantage, valued


def turns_of(name, trajectories):
    """Return the advantage of each action turn of each trajectory."""
    advantages, _ = credit(name, trajectories)
    rows, start = [], 0
    for t in trajectories:
        rows.append([])
        for turn in t.turns:
            values = advantages[start + turn.start : start + turn.end]
            assert len(set(values)) == 1
            if turn.action:
                rows[-1].append(float(values[0]))
        start += len(t)
    return rows


def firsts_of(name, trajectories):
    """Return one advantage for each trajectory, which all its turns must share."""
    rows = turns_of(name, trajectories)
    assert all(len(set(row)) == 1 for row in rows)
    return [row[0] for row in rows]


def group_of(name, rewards):
    """Return a group of trajectories of one turn with these rewards."""
    return [make_turns(f"{name}{i}", [named], group=name) for i, named in enumerate(rewards)]


def normal(values, deviation=statistics.pstdev):
    mean = sum(values) / len(values)
    return [0.0 if len(values) == 1 else (v - mean) / (deviation(values) + 1e-6) for v in values]


def test_gdpo_tells_apart_what_a_sum_merges():
    """2601.05242: mixes {(0,0),(0,1)} and {(0,0),(1,1)} give ∓.7071 and ∓1.4142 before whitening.

    Their mean is 0, their sample deviation sqrt((.5 + .5 + 2 + 2) / 3) = 1.29099, so ∓.54772 and ∓1.09545 after it.
    """
    zero = {"x": 0.0, "y": 0.0}
    members = group_of("a", [zero, {"x": 0.0, "y": 1.0}]) + group_of("b", [zero, {"x": 1.0, "y": 1.0}])
    np.testing.assert_allclose(firsts_of("gdpo", members), [-0.54772, 0.54772, -1.09545, 1.09545], atol=1e-5)


def test_gdpo_against_a_loop():
    rows = [(g, RNG.integers(0, 3, 2).tolist()) for g in "aaaabbbcc"]
    members = [
        make_turns(f"{i}", [{"x": float(x)}, {"y": float(y)}], group=g) for i, (g, (x, y)) in enumerate(rows)
    ]
    sums = [0.0] * len(rows)
    for group in "abc":
        places = [i for i, (g, _) in enumerate(rows) if g == group]
        for k in range(2):
            own = [float(rows[i][1][k]) for i in places]
            for i, value in zip(places, normal(own, statistics.stdev), strict=True):
                sums[i] += value
    np.testing.assert_allclose(firsts_of("gdpo", members), normal(sums, statistics.stdev), atol=1e-9)


def test_dvao_by_hand():
    """2605.25604: rewards [0,0], [0,0], [0,1], [1,1] have deviations .5 and .57735; the sum is the centred return
    divided by 1.07735. A reward of tiny spread has next to no say."""
    rows = [{"x": float(x), "y": float(y)} for x, y in [(0, 0), (0, 0), (0, 1), (1, 1)]]
    expected = [-0.696152, -0.696152, 0.232051, 1.160254]
    np.testing.assert_allclose(firsts_of("dvao", group_of("a", rows)), expected, atol=2e-6)
    with_noise = [row | {"z": 1e-4 * i} for i, row in enumerate(reversed(rows))]
    np.testing.assert_allclose(firsts_of("dvao", group_of("a", with_noise)), expected[::-1], atol=1e-3)
    assert firsts_of("dvao", group_of("a", [{"x": 1.0}] * 3)) == [0.0] * 3


def test_g2rpo_by_hand():
    """2604.08539: one success of five, whatever its size, is worth 1.281552 and the failures -.320388 each."""
    for reward in (1.0, 1e6):
        members = group_of("a", [{"r": 0.0}] * 4 + [{"r": reward}])
        np.testing.assert_allclose(firsts_of("g2rpo", members), [-0.320388] * 4 + [1.281552], atol=1e-6)


def test_dgpo_by_hand():
    """2601.20614: successes 1/8, 1/2, 7/8 at T = 2 have weights 1.192218, .988383, .819399; a solved task has none."""
    members = []
    for group, right in (("a", 1), ("b", 4), ("c", 7), ("d", 8)):
        members += group_of(group, [{"r": float(i < right)} for i in range(8)])
    expected = []
    for weight, right in ((1.192218, 1), (0.988383, 4), (0.819399, 7)):
        p = right / 8
        expected += [weight * ((i < right) - p) / (2 * p * (1 - p)) for i in range(8)]
    np.testing.assert_allclose(firsts_of("dgpo", members), expected + [0.0] * 8, atol=5e-5)


def test_loop_by_hand():
    """2502.01600: returns 1, 0, .5, .5 give 2/3, -2/3, 0, 0; the clip is 1/(1 + eps) to 1 + eps with eps .1."""
    members = group_of("a", [{"r": r} for r in (1.0, 0.0, 0.5, 0.5)])
    np.testing.assert_allclose(firsts_of("loop", members), [2 / 3, -2 / 3, 0, 0], atol=1e-12)
    surrogate = load(FILES["loop"]).learner.algorithm.surrogate
    assert 1 - surrogate.low == pytest.approx(1 / (1 + surrogate.high), abs=1e-8)


def test_tcr_by_hand():
    """2510.11701: right +1; wrong after 1, 3 and 5 turns -1, -.8, -.6; 18 of 22 tokens with a buffer of 8 cost .5."""
    members = [make_turns(str(n), [{}] * (n - 1) + [{"answer": 0.0}]) for n in (1, 3, 5)]
    members += [make_turns("r", [{"answer": 1.0}]), make_turns("s", [{"answer": 1.0}], lengths=[18])]
    np.testing.assert_allclose(firsts_of("grpo-tcr", members), normal([-1, -0.8, -0.6, 1, 0.5]), atol=1e-9)


def test_flow_grpo_counts_turns():
    """2510.05592: R = 1 with three turns against R = 0 with one: mean .75, deviation .5, so +.5 and -1.5."""
    members = [make_turns("t", [{}, {}, {"r": 1.0}]), make_turns("u", [{"r": 0.0}])]
    rows = turns_of("flow-grpo", members)
    np.testing.assert_allclose(rows[0], [0.5] * 3, atol=2e-6)
    np.testing.assert_allclose(rows[1], [-1.5], atol=5e-6)


def test_otc_by_hand():
    """2504.14870: with 2 calls the fewest, 4 calls are worth sin(pi / 3) = .8660; a wrong answer 0."""

    def member(name, calls, right):
        marks = [TurnMark("calls", 1, float(calls))]
        return replace(make_turns(name, [{"answer": float(right)}]), marks=marks)

    members = [member("t", 2, 1), member("u", 4, 1), member("v", 1, 0)]
    np.testing.assert_allclose(firsts_of("otc", members), normal([1.0, math.sqrt(0.75), 0.0]), atol=1e-9)


def test_spo_by_hand():
    """2401.04056: win rates 1, 0, 1/2 less their mean 1/2. The sizes of the returns do not matter."""
    members = group_of("a", [{"r": r} for r in (900.0, -1.0, 3.0)])
    np.testing.assert_allclose(firsts_of("spo-winrate", members), [0.5, -0.5, 0.0], atol=1e-12)


def test_gigpo_by_hand():
    """2505.10978: rewards 0, 0, 10 and none, one state in common. Returns to go 9.025, 9.5, 10.

    Over the six turns the episode term is ±.9129; in the shared state the step term is ±.7071, elsewhere 0.
    """
    members = [
        make_turns("t", [{}, {}, {"r": 10.0}], anchors=["s", "a", "b"]),
        make_turns("u", [{}, {}, {"r": 0.0}], anchors=["s", "c", "d"]),
    ]
    np.testing.assert_allclose(
        turns_of("gigpo", members), [[1.61998, 0.91287, 0.91287], [-1.61998, -0.91287, -0.91287]], atol=1e-5
    )
    alone = [
        replace(t, marks=[TurnMark("anchor", m.turn, f"{t.trajectory_id}{m.turn}") for m in t.marks])
        for t in members
    ]
    without = [replace(t, marks=[]) for t in members]
    for trajectories in (alone, without):
        assert turns_of("gigpo", trajectories) == turns_of_episode(trajectories)


def turns_of_episode(trajectories):
    """Return the episode term of GiGPO alone, by a loop over turns."""
    returns = [t.return_ for t in trajectories for turn in t.turns if turn.action]
    mean, deviation = sum(returns) / len(returns), statistics.stdev(returns)
    return [
        [pytest.approx((t.return_ - mean) / (deviation + 1e-6)) for turn in t.turns if turn.action]
        for t in trajectories
    ]


def random_walks(count=5, states="xy"):
    """Return trajectories of a group that meet the same states often."""
    walks = []
    for i in range(count):
        n = int(RNG.integers(1, 6))
        rewards = [{"r": float(RNG.integers(0, 3))} for _ in range(n)]
        walks.append(make_turns(f"w{i}", rewards, anchors=[str(s) for s in RNG.choice(list(states), n)]))
    return walks


def slow_hgpo(trajectories, depths=3, gamma=0.95):
    """The card's F27 by loops: levels with one member are left out, and their weights with them."""
    steps = []
    for t in trajectories:
        rewards = [r.value for r in t.rewards]
        states = [m.value for m in t.marks]
        for j in range(len(states)):
            value = sum(gamma ** (k - j) * rewards[k] for k in range(j, len(rewards)))
            steps.append(
                (t.trajectory_id, value, [tuple(states[max(0, j - k) : j + 1]) for k in range(depths)])
            )
    result = {t.trajectory_id: [] for t in trajectories}
    for name, value, contexts in steps:
        total = weights = 0.0
        for k, context in enumerate(contexts):
            peers = [v for _, v, others in steps if others[k] == context]
            if len(peers) < 2:
                continue
            deviation = statistics.pstdev(peers)
            mean = sum(peers) / len(peers)
            same = max(peers) - min(peers) < 1e-9
            total += (k + 1) * (0.0 if same else (value - mean) / (deviation + 1e-6))
            weights += k + 1
        result[name].append(total / weights if weights else 0.0)
    return list(result.values())


def test_hgpo_against_loops():
    for _ in range(5):
        members = random_walks()
        for got, expected in zip(turns_of("hgpo", members), slow_hgpo(members), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-9)


def test_hgpo_by_hand():
    """2602.22817: one state, returns 1 and 0, gives ±1 at every depth, also where histories differ."""
    same = [make_turns(n, [{"r": r}], anchors=["s"]) for n, r in (("t", 1.0), ("u", 0.0))]
    np.testing.assert_allclose(firsts_of("hgpo", same), [1, -1], atol=5e-6)
    differ = [make_turns(n, [{}, {"r": r}], anchors=[n, "s"]) for n, r in (("t", 1.0), ("u", 0.0))]
    np.testing.assert_allclose(turns_of("hgpo", differ), [[0, 1], [0, -1]], atol=5e-6)
    apart = [make_turns(n, [{"r": r}], anchors=[n]) for n, r in (("t", 1.0), ("u", 0.0))]
    assert firsts_of("hgpo", apart) == [0.0, 0.0]


def test_hgpo_looks_back_along_the_branch():
    """Member u takes its last turn from the prompt, in a branch of its own, so state s has no history there.

    Depth 0 compares the returns 1, 0 and 1/2 in s. Deeper, u meets w, which begins in s, and t meets nobody.
    """
    t, u = (make_turns(n, [{}, {"r": r}], anchors=["p", "s"]) for n, r in (("t", 1.0), ("u", 0.0)))
    w = make_turns("w", [{"r": 0.5}], anchors=["s"])
    u = replace(u, turns=[*u.turns[:2], replace_turn(u.turns[2], back=0), u.turns[3]])
    assert anchor_histories(t, 2) == {1: ("p",), 3: ("p", "s")}
    assert anchor_histories(u, 2) == {1: ("p",), 3: ("s",)}
    first = math.sqrt(1.5)
    rows = turns_of("hgpo", [t, u, w])
    got = [rows[0][1], rows[1][1], rows[2][0]]
    np.testing.assert_allclose(got, [first, -(first + 5) / 6, 5 / 6], atol=1e-5)


def test_informative_groups_are_counted_by_their_advantages():
    """RAPO's scale beside GDPO's sum: (1,0) and (0,1) have equal returns and count; four equal members do not."""
    rows = [{"x": 1.0, "y": 0.0}, {"x": 0.0, "y": 1.0}]
    settings = {"kind": "compared", "terms": [{"value": "x"}, {"value": "y", "weight": 2.0}]}
    members = group_of("a", rows) + group_of("b", rows[:1] * 2) + group_of("c", rows[:1] * 2)
    for extra in ({}, {"terms": [{"value": "x", "of": "turn"}, {"value": "y", "of": "turn", "weight": 2.0}]}):
        advantage = settings | extra
        plain = assign_advantages(AlgorithmConfig(advantage=advantage), members).advantage
        scaled = assign_advantages(
            AlgorithmConfig(advantage=advantage, scale_by_informative=True), members
        ).advantage
        assert np.abs(plain).max() == pytest.approx(1.0, abs=1e-5)
        np.testing.assert_allclose(scaled, 3 * plain)


def test_eapo_against_the_formula():
    """2511.07327: gamma^(T - t) R, compared over all turns of the group; a failure has 0 everywhere."""
    members = [
        make_turns("t", [{}] * 4 + [{"r": 1.0}]),
        make_turns("u", [{}, {"r": 0.0}]),
        make_turns("v", [{"r": 1.0}]),
    ]
    values = [0.95**k for k in (4, 3, 2, 1, 0)] + [0.0, 0.0] + [1.0]
    got = [a for row in turns_of("eapo", members) for a in row]
    np.testing.assert_allclose(got, normal(values), atol=1e-9)
    assert got[0] < got[4] == got[7]


def test_prs_trains_the_form_first():
    """2512.07478: before version 30 the answer has no say; from then on it has."""

    def members(version):
        rows = [{"step": 1.0, "answer": 0.0}], [{"step": 0.0, "answer": 5.0}]
        made = [make_turns(str(i), row) for i, row in enumerate(rows)]
        return [
            replace(t, policy_version=np.where(t.action_mask, version, -1).astype(np.int32)) for t in made
        ]

    np.testing.assert_allclose(firsts_of("prs", members(29)), [1, -1], atol=5e-6)
    np.testing.assert_allclose(firsts_of("prs", members(30)), [-1, 1], atol=5e-6)


def gradient(name, trajectories):
    """Return the gradient of the sum of advantages times log-probabilities, of a table of logits by position."""
    advantages, valued = credit(name, trajectories)
    longest = max(map(len, valued))
    logits = (
        torch.linspace(-1, 1, longest * VOCABULARY, dtype=torch.float64)
        .reshape(longest, VOCABULARY)
        .requires_grad_()
    )
    total, start = torch.zeros((), dtype=torch.float64), 0
    for t in valued:
        logp = logits.log_softmax(-1)[torch.arange(len(t)), torch.from_numpy(t.token_ids).long()]
        mask = torch.from_numpy(t.action_mask)
        total = total + (logp * torch.from_numpy(advantages[start : start + len(t)]))[mask].sum()
        start += len(t)
    total.backward()
    return logits.grad


@pytest.mark.parametrize("name", NAMES)
def test_the_named_part_changes_the_gradient(name):
    """On the same tokens and rewards, the step is another one than that of plain GRPO."""
    members, rng = [], np.random.default_rng(3)
    for group in "ab":
        for i in range(4):
            n = int(rng.integers(1, 5))
            rewards = [
                {"step": float(rng.integers(0, 2)), "answer": float(i % 2) * (k == n - 1)} for k in range(n)
            ]
            t = make_turns(
                f"{group}{i}", rewards, group=group, anchors=[str(s) for s in rng.choice(list("xy"), n)]
            )
            calls = [TurnMark("calls", 2 * k + 1, float(rng.integers(0, 3))) for k in range(n)]
            members.append(replace(t, marks=[*t.marks, *calls]))
    plain, own = gradient("grpo", members), gradient(name, members)
    assert (own - plain).norm() > 0.02 * plain.norm()
    cosine = torch.nn.functional.cosine_similarity(own.flatten(), plain.flatten(), dim=0)
    assert cosine < 0.9999, "not only another length"
