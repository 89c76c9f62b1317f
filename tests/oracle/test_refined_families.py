"""Refined episodes (Dyna-Mind, arXiv:2510.09577) against a slow twin of the card, and a gradient that changes."""

from dataclasses import replace

import numpy as np
import torch

from launch.run_file.load import METHODS_FOLDER, load, run_files
from learner.advantages import assign_advantages
from learner.comparisons import has_signal
from learner.families.family import ChildTask, FamilyStage, TaskFamily
from learner.families.notes import refined_advantages, refined_metrics, shown_turns, true_future
from learner.families.reactions import Surroundings, joined, react, settle
from learner.settings.families import RefineFamily
from learner.trajectory import Unit
from protocol.messages.fields import MAX_TEXT
from tests.oracle.test_credit_recipes import gradient
from tests.trajectories import make_turns

CONFIG = RefineFamily(rollouts=2, horizon=2, note="Then: {future}")
RNG = np.random.default_rng(59)


def words(token_ids):
    return "-".join(map(str, token_ids))


def episode(member, value, *, stage=0, turns=3, correct=None):
    """Return an episode of some turns; its tokens are 10 a turn and member, and its prompt tells the stages apart."""
    group = "0g3" if not stage else f"0g3r{stage}"
    rewards = [{}] * (turns - 1) + [{"answer": value}]
    t = make_turns(f"{group}.{member}.0", rewards, group=group, correct=correct)
    ids = np.array([100 * member + turn.index for turn in t.turns for _ in range(turn.start, turn.end)])
    ids[:2] = 900 + stage
    return replace(t, token_ids=ids.astype(np.int32))


def family_of(plain, refined, **how):
    family = TaskFamily("0g3")
    family.add_stage(FamilyStage("0g3", "0g3", [episode(i, value) for i, value in enumerate(plain)]))
    asked = react(CONFIG, family, Surroundings(6, words, 99))
    members = [episode(i, value, stage=1, **how) for i, value in enumerate(refined)]
    family.add_stage(FamilyStage("0g3r1", "0g3r1", members), asked)
    assert react(CONFIG, family, Surroundings(6, words, 99)) == []
    return family


def test_a_refined_episode_reads_what_really_followed():
    """Two actions and their observations are shown; the third action has no observation behind it."""
    t = episode(1, 1.0)
    assert [(turn.index, turn.action) for turn in t.turns] == [(n, bool(n % 2)) for n in range(6)]
    assert [turn.index for turn in shown_turns(t, 9)] == [1, 2, 3, 4]
    assert true_future(t, 9, words) == "101-101\n102\n103-103\n104"
    assert true_future(t, 1, words) == "101-101\n102"
    family = TaskFamily("0g3")
    family.add_stage(FamilyStage("0g3", "0g3", [episode(1, 0.0), episode(0, 0.0)]))
    asked = react(CONFIG, family, Surroundings(5, words, 99))
    first, second = "Then: 1-1\n2\n3-3\n4", "Then: 101-101\n102\n103-103\n104"
    assert asked == [ChildTask(first), ChildTask(second), ChildTask(first)], "by member, in turn"


def test_where_nothing_followed_the_group_is_as_it_is():
    for members in ([episode(0, 1.0, turns=1), episode(1, 0.0, turns=1)], []):
        family = TaskFamily("0g3")
        family.add_stage(FamilyStage("0g3", "0g3", members))
        assert react(CONFIG, family, Surroundings(6, words, 99)) == []
        assert settle(CONFIG, family).trained == members
    family.stages = [FamilyStage("0g3", "0g3", [episode(0, 1.0)])]
    assert len(react(CONFIG, family, Surroundings(6, words, 12))) == 4, "six tokens are shown"
    assert react(CONFIG, family, Surroundings(6, words, 11)) == [], "no room for an answer of that length"


def test_a_long_future_is_cut():
    family = TaskFamily("0g3")
    family.add_stage(FamilyStage("0g3", "0g3", [episode(0, 1.0)]))
    (task, *_) = react(CONFIG, family, Surroundings(3, lambda ids: "x" * MAX_TEXT, 99))
    assert len(task.note) <= MAX_TEXT


def slow(plain, refined):
    """The card's A_refine, episode by episode: (return, right) each."""
    out = []
    for value, right in refined:
        beats = value > sum(v for v, _ in plain) / len(plain) and value > sum(v for v, _ in refined) / len(
            refined
        )
        out.append(1.0 if right and beats else 0.0)
    return out


def test_the_advantage_against_a_slow_twin():
    """By hand: plain 0 and 1, so .5; refined 1, 1, 0, 0, so .5: the two right ones have 1. With plain 1, 1: none."""
    family = family_of([0.0, 1.0], [1.0, 1.0, 0.0, 0.0])
    assert [t.advantage for t in settle(CONFIG, family).trained] == [None, None, 1.0, 1.0, 0.0, 0.0]
    assert refined_metrics(settle(CONFIG, family).trained) == {"family/refined_share": 0.5}
    assert refined_metrics(family.stages[0].members) == {}
    assert [t.advantage for t in settle(CONFIG, family_of([1.0, 1.0], [1.0, 1.0, 0.0, 0.0])).trained[2:]] == [
        0.0
    ] * 4
    for _ in range(100):
        n, m = RNG.integers(1, 6, 2)
        plain = [(float(RNG.integers(-2, 10)), bool(RNG.random() < 0.5)) for _ in range(n)]
        refined = [(float(RNG.integers(-2, 10)), bool(RNG.random() < 0.5)) for _ in range(m)]
        made = [
            [episode(i, value, stage=s, correct=right) for i, (value, right) in enumerate(rows)]
            for s, rows in enumerate((plain, refined))
        ]
        assert refined_advantages(made[1], made[0]) == slow(plain, refined)


def test_plain_episodes_are_those_of_grpo():
    """Refined ones are in no mean and no deviation: plain 0 and 1 have -1 and 1 whatever the refined ones get."""
    algorithm = load(run_files(METHODS_FOLDER)["dyna-mind"]).learner.algorithm
    for refined in ([1.0, 0.0], [9.0, 9.0]):
        members = settle(CONFIG, family_of([0.0, 1.0], refined)).trained
        starts = np.cumsum([0, *map(len, members)])[:-1]
        found = assign_advantages(algorithm, members).advantage[starts]
        np.testing.assert_allclose(found[:2], [-1, 1], atol=1e-5)
        np.testing.assert_array_equal(found[2:], [t.advantage for t in members[2:]])


def slope(members):
    return gradient("dyna-mind", [replace(t, token_ids=t.token_ids % 48) for t in members])


def test_a_refined_episode_without_an_advantage_has_no_gradient_and_one_with_it_has():
    """Card A15: refined rollouts with zero A_refine give zero gradient."""
    plain = settle(CONFIG, family_of([0.0, 1.0], [])).trained
    worse = settle(CONFIG, family_of([0.0, 1.0], [0.5, 0.0])).trained
    better = settle(CONFIG, family_of([0.0, 1.0], [1.0, 0.0])).trained
    assert len(worse) == len(better) == 4
    assert torch.equal(slope(worse), slope(plain))
    assert not torch.allclose(slope(better), slope(plain))


def test_a_recorded_family_is_trained_as_it_was():
    family = family_of([0.0, 1.0], [1.0, 0.0])
    was = settle(CONFIG, family).trained
    (again,) = joined(CONFIG, [Unit(s.unit_id, s.unit_id, list(s.members)) for s in family.stages])
    assert [(t.trajectory_id, t.advantage) for t in again.trajectories] == [
        (t.trajectory_id, t.advantage) for t in was
    ]


def test_a_family_is_without_a_signal_if_it_would_train_nothing():
    """Plain episodes are compared with each other alone, so equal ones train nothing beside refined ones of 0."""
    algorithm = load(run_files(METHODS_FOLDER)["dyna-mind"]).learner.algorithm

    def told_and_true(plain, refined, **how):
        trained = settle(CONFIG, family_of(plain, refined, **how)).trained
        advantage = assign_advantages(algorithm, trained).advantage
        return has_signal(algorithm.advantage, trained), bool((np.abs(advantage) > 1e-9).any())

    assert told_and_true([0.0, 0.0], [1.0, 1.0, 1.0, 1.0]) == (False, False)
    assert told_and_true([0.0, 0.0], [0.0, 1.0]) == (True, True), "an advantage of its own"
    assert told_and_true([0.0, 1.0], [0.0, 0.0]) == (True, True)
    for _ in range(40):
        plain, refined = (RNG.choice([0.0, 1.0], 2).tolist() for _ in range(2))
        told, true = told_and_true(plain, refined, correct=bool(RNG.integers(2)))
        assert told == true
