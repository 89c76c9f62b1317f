"""Test the composition of rewards against slow twins and the numbers of the papers' cards."""

import math
from dataclasses import replace

import numpy as np
import pytest

from learner.curriculum import Curriculum
from learner.intake.intake import Intake
from learner.rewards import call_factor, composed, needed_rewards, overlong_penalty, updates_at, win_rates
from learner.settings.advantages import RewardConfig
from learner.settings.learner import LearnerConfig
from protocol.codec import decode, encode_delivery
from protocol.messages.episodes import Deliver, Reward, TurnMark
from protocol.version_line import VersionLine
from tests.trajectories import make_turns
from tests.unit.learner.test_reward_weights import member

RNG = np.random.default_rng(43)


def config(**settings):
    return RewardConfig.model_validate(settings)


def returns(settings, members, **more):
    return [t.return_ for t in composed(config(**settings), members, **more)]


def test_without_settings_trajectories_are_the_same_objects():
    members = [make_turns("t", [{"x": 0.1}, {"x": 0.2}]), make_turns("u", [{"y": 3.0}])]
    assert all(a is b for a, b in zip(composed(config(), members), members, strict=True))
    assert composed(config(), []) == []


def test_weights_of_1_change_no_bit():
    members = [
        make_turns(str(i), [{"x": float(v), "y": float(w)}])
        for i, (v, w) in enumerate(RNG.normal(size=(9, 2)))
    ]
    assert returns({"weights": {"x": 1.0, "y": 1.0}}, members) == [t.return_ for t in members]


def test_given_rewards_stay_as_they_were():
    (t,) = composed(
        config(weights={"x": 2.0}, length={"longest_tokens": 4, "buffer_tokens": 2}),
        [make_turns("t", [{"x": 1.0}])],
    )
    assert t.reward_by_name == {"x": 1.0}
    assert t.rewards == [Reward("x", 1, 2.0), Reward("overlong", 1, 0.0)]


def test_stages_follow_the_newest_token_of_the_group():
    """PRS, arXiv:2512.07478: first the form, then the answer. A group has one stage, whatever its versions."""
    stages = [
        {"until_version": 3, "weights": {"form": 1.0, "answer": 0.0}},
        {"until_version": 5, "weights": {"form": 0.5}},
    ]
    settings = {"stages": stages, "weights": {"form": 0.0}}

    def group(version):
        other = make_turns("u", [{"form": 1.0, "answer": 4.0}])
        newer = replace(other, policy_version=np.where(other.action_mask, version, -1).astype(np.int32))
        return [make_turns("t", [{"form": 1.0, "answer": 4.0}]), newer]

    assert [returns(settings, group(version)) for version in (2, 3, 4, 5)] == [
        [1.0, 1.0], [4.5, 4.5], [4.5, 4.5], [4.0, 4.0],
    ]  # fmt: skip


def test_a_gate_needs_the_other_reward():
    """GDPO, arXiv:2601.05242: the easy reward counts only where the hard one is met; the sum decides, not a turn."""
    settings = {"gates": [{"reward": "short", "needs": "right"}], "weights": {"short": 0.5, "right": 0.0}}
    members = [
        make_turns("t", [{"short": 1.0}, {"right": 1.0}]), make_turns("u", [{"short": 1.0}, {"right": 0.0}]),
        make_turns("v", [{"short": 1.0}]),
    ]  # fmt: skip
    assert returns(settings, members) == [0.5, 0.0, 0.0]


def slow_otc(m, n, c=1.0):
    """The three cases of the third-party program in the card, with its intermediate f."""
    f = 0 if m == n == 0 else m if n == 0 else 2 * n * m / (m + n)
    if f == n == 0:
        return 1.0
    return math.cos(m * math.pi / (2 * m + c)) if n == 0 else math.sin(f * math.pi / (2 * n))


def test_call_factor_against_the_cases_and_the_numbers_of_the_card():
    assert [round(call_factor(m, 0), 4) for m in range(5)] == [1, 0.5, 0.309, 0.2225, 0.1736]
    assert [round(call_factor(m, 2), 4) for m in range(7)] == [0, 0.866, 1, 0.9511, 0.866, 0.7818, 0.7071]
    for n in range(6):
        for m in range(9):
            assert call_factor(m, n, smooth=1.5) == pytest.approx(slow_otc(m, n, 1.5), abs=1e-12)


def test_fewest_calls_of_a_right_answer_decide():
    """OTC, arXiv:2504.14870. A wrong answer with fewer calls is no measure, and a group without right ones stays."""
    settings = {"group": {"kind": "fewest_calls", "reward": "answer"}}
    turns = [{}] * 2 + [{"answer": 2.0}], [{}] * 4 + [{"answer": 2.0}], [{"answer": 0.0, "form": 1.0}]
    members = [make_turns(str(i), rewards) for i, rewards in enumerate(turns)]
    got = returns(settings, members)
    assert got == pytest.approx([2.0, 2 * slow_otc(4, 2), 1.0])
    assert returns(settings, members, group=False) == [2.0, 2.0, 1.0]
    assert composed(config(**settings), members[2:])[0] is members[2]


def test_calls_may_be_marks():
    settings = {"group": {"kind": "fewest_calls", "reward": "answer", "calls": "calls"}}
    marks = (
        [TurnMark("calls", 1, 1.0), TurnMark("calls", 3, 3.0)],
        [TurnMark("calls", 1, 2.0), TurnMark("other", 1, 9.0)],
    )
    members = [make_turns("t", [{}, {"answer": 1.0}]), make_turns("u", [{"answer": 1.0}])]
    members = [replace(t, marks=own) for t, own in zip(members, marks, strict=True)]
    assert returns(settings, members) == pytest.approx([slow_otc(4, 2), 1.0])


def slow_win_rates(values):
    def beats(a, b):
        return 1.0 if a > b else 0.5 if a == b else 0.0

    n = len(values)
    return [sum(beats(values[i], values[j]) for j in range(n) if j != i) / (n - 1) for i in range(n)]


def test_win_rates_against_the_sum():
    """SPO, arXiv:2401.04056: the mean is 1/2, and a total order over k gives 0, 1/(k-1), ..., 1."""
    values = RNG.integers(0, 4, 9).astype(float).tolist()
    assert win_rates(values) == pytest.approx(slow_win_rates(values))
    assert sum(win_rates(values)) == pytest.approx(4.5)
    assert win_rates([5.0, -1.0, 2.0]) == [1.0, 0.0, 0.5]


def test_win_rate_replaces_what_it_compares():
    members = [make_turns("t", [{"x": 5.0}, {"y": 1.0}]), make_turns("u", [{"x": 1.0}, {"x": 1.0, "y": 2.0}])]
    assert returns({"group": {"kind": "win_rate", "reward": "x"}}, members) == [2.0, 2.0]
    assert returns({"group": {"kind": "win_rate"}}, members) == [1.0, 0.0]
    (first, _) = composed(config(group={"kind": "win_rate"}), members)
    assert first.rewards == [Reward("win_rate", 3, 1.0)]


def test_win_rate_of_the_return_compares_what_would_be_trained_on():
    """Weights, stages, gates and the penalty on length decide who wins, not the sum that the environment gave."""
    win = {"group": {"kind": "win_rate"}}
    t, u = make_turns("t", [{"x": 5.0, "y": 0.0}]), make_turns("u", [{"x": 1.0, "y": 3.0}], lengths=[4])
    stage = {"until_version": 1, "weights": {"x": 0.0}}
    assert returns(win, [t, u]) == [1.0, 0.0]
    assert returns(win | {"weights": {"x": 0.0}}, [t, u]) == [0.0, 1.0]
    assert returns(win | {"stages": [stage]}, [t, u]) == [0.0, 1.0]
    assert returns(win | {"stages": [stage]}, [t, u], updates=1) == [1.0, 0.0]
    assert returns(win | {"gates": [{"reward": "x", "needs": "y"}]}, [t, u]) == [0.0, 1.0]
    length = {"longest_tokens": 4, "buffer_tokens": 1, "factor": 9.0}
    assert returns(win | {"weights": {"y": 2.0}, "length": length}, [t, u]) == [1.0, 0.0]
    assert returns(win | {"weights": {"y": 2.0}}, [t, u]) == [0.0, 1.0]
    assert returns(win | {"weights": {"win_rate": 3.0}}, [t, u]) == [3.0, 0.0]


def test_the_penalty_on_length_has_weights_and_gates_as_other_rewards():
    length = {"longest_tokens": 4, "buffer_tokens": 2}
    members = [make_turns("t", [{"x": 1.0}], lengths=[4]), make_turns("u", [{"x": 0.0}], lengths=[4])]
    assert returns({"length": length, "weights": {"overlong": 0.25}}, members) == [0.75, -0.25]
    gate = {"reward": "overlong", "needs": "x"}
    assert returns({"length": length, "gates": [gate]}, members) == [0.0, 0.0]
    later = {"until_version": 9, "weights": {"overlong": 0.0}}
    assert returns({"length": length, "stages": [later]}, members) == [1.0, 0.0]
    named = LearnerConfig(
        reward={"length": length, "gates": [gate], "weights": {"overlong": 0.5, "win_rate": 1.0}}
    )
    assert [name for _, name in needed_rewards(named)] == ["win_rate", "x"], "made here, and given by nobody"


def test_stages_do_not_shorten_when_a_learner_goes_back_to_a_checkpoint():
    """Versions 11 to 19 were undone and 20 continues 10, so 23 is 13 updates from the start, as 13 was."""
    line = VersionLine([(10, 20)])
    assert [updates_at(line, line.place(v)) for v in (8, 10, 11, 17, 20, 23)] == [8, 10, 9, 3, 10, 13]
    line = VersionLine([(10, 20), (12, 30), (31, 40)])
    assert [updates_at(line, v) for v in (40, 42)] == [13, 15], "12 to 30 went around 20"
    learner = LearnerConfig(
        group_size=2, batch_trajectories=4, max_policy_lag=0,
        reward={"stages": [{"until_version": 3, "weights": {"exact": 0.0}}]},
    )  # fmt: skip
    for forks, expected in (([], [1.0, 0.0]), ([(2, 9)], [0.0, 0.0])):
        curriculum = Curriculum("rows", learner)
        curriculum.refill(version=0, lockstep=False)
        intake = Intake(curriculum, False, line=VersionLine(forks))
        members = [member(i, [Reward("exact", 1, 1.0 - i)], version=9) for i in range(2)]
        intake.receive(*decode(encode_delivery(Deliver(unit_id="0g0", segments=2), members)))
        (unit,) = intake.ready
        assert [t.return_ for t in unit.trajectories] == expected


def test_wrong_answers_by_their_turns():
    """GRPO-TCR, arXiv:2510.11701: 2, 6, 10 and 18 messages are 1, 3, 5 and 9 turns of the policy."""
    members = [make_turns(str(n), [{}] * (n - 1) + [{"answer": 0.0}]) for n in (1, 3, 5, 9)]
    right = make_turns("r", [{"answer": 1.0}])
    none = make_turns("n", [{"form": 0.25}])
    got = returns({"wrong": {"reward": "answer"}}, [*members, right, none])
    assert got == pytest.approx([-1.0, -0.8, -0.6, -0.6, 1.0, -0.75])


def test_overlong_penalty_is_added_as_a_reward():
    """Of 20,480 tokens with a buffer of 4,096: 20,480 -> -1, 18,432 -> -1/2, 16,384 -> 0; here 4 and 2 tokens."""
    length = {"longest_tokens": 4, "buffer_tokens": 2, "factor": 0.5}
    members = [make_turns(str(n), [{"x": 1.0}], lengths=[n]) for n in (2, 3, 4, 7)]
    assert returns({"length": length}, members) == [1.0, 0.75, 0.5, 0.5]
    assert overlong_penalty(config(length=length).length, 3) == -0.25


def test_the_intake_composes_whole_groups():
    """Two right answers of the wire, one with a call more than the other: the rewards differ, the given do not."""
    learner = LearnerConfig(
        group_size=2, batch_trajectories=4, max_policy_lag=0,
        reward={"group": {"kind": "win_rate", "reward": "exact"}, "gates": [{"reward": "length", "needs": "exact"}]},
    )  # fmt: skip
    curriculum = Curriculum("rows", learner)
    curriculum.refill(version=0, lockstep=False)
    intake = Intake(curriculum, True)
    members = [member(i, [Reward("exact", 1, 1.0 - i), Reward("length", 1, 3.0)]) for i in range(2)]
    intake.receive(*decode(encode_delivery(Deliver(unit_id="0g0", segments=2), members)))
    (unit,) = intake.ready
    assert [t.return_ for t in unit.trajectories] == [4.0, 0.0]
    assert [t.reward_by_name for t in unit.trajectories] == [
        {"exact": 1.0, "length": 3.0},
        {"exact": 0.0, "length": 3.0},
    ]
    assert [t.return_ for t in intake.recent] == [4.0, 0.0]
