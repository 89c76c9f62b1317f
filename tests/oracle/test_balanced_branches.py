"""The rollout of AEPO (a3, arXiv:2510.14545): whole episodes or branches by the entropy gap, seldom in a row."""

import math
from dataclasses import replace

import numpy as np
import pytest

from learner.families.branching import branch_probability, chosen, entropy_gap, whole_episodes
from learner.families.family import ChildTask, FamilyStage, TaskFamily
from learner.families.reactions import Surroundings, react, settle
from learner.settings.families import BranchFamily
from protocol import names
from tests.trajectories import make_turns

BALANCED = BranchFamily(rollouts=1, whole="entropy_gap", penalty=0.05)


def episode(name, surprisals, group="0g3"):
    """Return a trajectory with two tokens for each answer, of the given -log p."""
    t = make_turns(name, [{} for _ in surprisals], group=group, lengths=[2] * len(surprisals))
    behaviour = np.zeros(len(t), np.float32)
    for turn, value in zip([turn for turn in t.turns if turn.action], surprisals, strict=True):
        behaviour[turn.start : turn.end] = -value
    return replace(t, logp_behaviour=behaviour)


def react_to(config, *stages, group_size=16, seed=0):
    groups = [names.stage_id("0g3", number) for number in range(len(stages))]
    family = TaskFamily(
        "0g3", [FamilyStage(group, group, members) for group, members in zip(groups, stages, strict=True)]
    )
    return family, react(config, family, Surroundings(group_size, None, 999, seed))


def test_the_chance_of_a_branch_against_the_draw_of_the_program():
    """The authors' program draws u and branches if clip((u + w dH) max(0, 1 - .05 c), 0, 1) >= 1/2.

    Card a3: at dH = 0 the chance is 1/2, 1/3 and 0 for c = 0, 5 and 10.
    """
    assert [branch_probability(0.0, 0.2, streak=c, penalty=0.05) for c in (0, 5, 10)] == pytest.approx(
        [1 / 2, 1 / 3, 0]
    )
    draws = (np.arange(20_000) + 0.5) / 20_000
    for change in (-3.0, -0.5, 0.0, 0.7, 4.0):
        for streak in (0, 1, 5, 9, 15, 20, 30):
            kept = max(0.0, 1 - 0.05 * streak)
            slow = np.mean(np.clip((draws + 0.2 * change) * kept, 0, 1) >= 0.5)
            found = branch_probability(change, 0.2, streak=streak, penalty=0.05)
            assert found == pytest.approx(slow, abs=1e-4)


def test_the_gap_decides_how_many_episodes_are_whole():
    """Card a3, n = 16: gaps of -2, 0 and 2 give 5, 9 and 12. Never none, and never more than the group."""
    assert [whole_episodes(16, gap) for gap in (-2.0, 0.0, 2.0)] == [5, 9, 12]
    for n in (2, 7, 16):
        for gap in np.linspace(-60, 60, 41):
            slow = max(1, min(n, int(n * (1 / (1 + math.exp(-0.5 * gap)))) + 1))
            assert whole_episodes(n, float(gap)) == slow


def test_the_gap_is_the_first_answer_less_the_mean_of_all():
    """By hand: answers of 3, 1 and 2 nats have the mean 2, so the gap is 1; of 1, 3 and 2 it is -1."""
    assert entropy_gap(BALANCED, [episode("0g3.0.0", [3, 1, 2])]) == pytest.approx(1.0)
    both = [episode("0g3.0.0", [3, 1, 2]), episode("0g3.1.0", [1, 3, 2])]
    assert entropy_gap(BALANCED, both) == pytest.approx(0.0)


@pytest.mark.parametrize(("surprisals", "whole"), [((2, 2, 2), 9), ((1, 7, 4), 3), ((9, 1, 1), 15)])
def test_whole_episodes_come_first_and_then_the_branches(surprisals, whole):
    """Gaps of 0, -3 and 16/3: 16 sigma(gap / 2) is 8, 2.92 and 14.96; rounded down, and one more: 9, 3, 15."""
    first = [episode("0g3.0.0", surprisals)]
    _, further = react_to(BALANCED, first)
    assert further == [ChildTask()] * (whole - 1)
    others = [episode(f"0g3r1.{i}.0", surprisals, "0g3r1") for i in range(whole - 1)]
    family, children = react_to(BALANCED, first, others)
    assert len(children) == 16 - whole
    assert react_to(BALANCED, first, others)[1] == children, "the same after a restart"
    names_ = {t.trajectory_id for t in (*first, *others)}
    assert {child.start.parent for child in children if child.start} <= names_
    branches = [episode(f"0g3r2.{i}.0", surprisals, "0g3r2") for i in range(16 - whole)]
    family, asked = react_to(BALANCED, first, others, branches)
    assert asked == []
    assert len(settle(BALANCED, family).trained) == 16
    assert {t.group_id for t in settle(BALANCED, family).trained} == {"0g3"}


def test_a_group_that_is_all_whole_has_no_branches():
    first = [episode("0g3.0.0", [200, 1, 1])]
    assert react_to(BALANCED, first)[1] == [ChildTask()] * 15
    others = [episode(f"0g3r1.{i}.0", [200, 1, 1], "0g3r1") for i in range(15)]
    assert react_to(BALANCED, first, others)[1] == []


def test_as_many_as_were_measured_are_never_too_many():
    """With five whole episodes measured and a gap that asks for three, the five stay and the rest are branches."""
    config = BALANCED.model_copy(update={"rollouts": 5})
    first = [episode(f"0g3.{i}.0", [1, 7, 4]) for i in range(5)]
    children = react_to(config, first)[1]
    assert len(children) == 11
    assert any(child.start for child in children)


def test_branches_in_a_row_become_rare():
    """64 episodes of 13 answers, dH = 0: a round of 64 draws branches for certain, so c grows by 1 in each round.

    The expected share falls as 1 - 1 / (2 (1 - .05 c)), until it is 0 in the eleventh round."""
    members = [episode(f"0g3.{i}.0", [1] * 13) for i in range(64)]
    counts = np.zeros(12)
    for seed in range(50):
        for _, turn in chosen(BALANCED, members, np.random.default_rng(seed)):
            counts[turn // 2 - 1] += 1
    shares = counts / (50 * 64)
    expected = [1 - 0.5 / (1 - 0.05 * c) for c in range(9)]
    assert shares[:9] == pytest.approx(expected, abs=0.04)
    assert shares[10] == 0.0
    free = BALANCED.model_copy(update={"penalty": 0.0})
    rounds = [turn for _, turn in chosen(free, members, np.random.default_rng(0))]
    assert len(rounds) / (12 * 64) == pytest.approx(0.5, abs=0.06)


def test_a_round_without_a_branch_ends_the_row():
    """With one episode the row is over wherever the draw fails: the rate is that of a chain of two states a turn."""
    members = [episode("0g3.0.0", [1] * 13)]
    taken = [len(list(chosen(BALANCED, members, np.random.default_rng(s)))) for s in range(3000)]
    streak, expected = np.zeros(13), 0.0
    streak[0] = 1.0
    for _ in range(12):
        chances = np.array([branch_probability(0.0, 0.2, streak=c, penalty=0.05) for c in range(13)])
        expected += float(streak @ chances)
        streak = np.concatenate([[streak @ (1 - chances)], (streak * chances)[:-1]])
    assert np.mean(taken) == pytest.approx(expected, abs=0.15)
