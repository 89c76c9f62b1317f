"""Families of groups: what the papers' cards say of hints and drafts, and what is trained of each family."""

from dataclasses import replace

import numpy as np
import pytest

from learner.algorithm_config import AlgorithmConfig
from learner.families.drafts import answer_of
from learner.families.family import UNBEGUN, ChildTask, FamilyStage, TaskFamily
from learner.families.family_config import DraftFamily, HintFamily
from learner.families.hints import hint_levels, is_solved
from learner.families.reactions import react, settle
from learner.families.recorded import joined
from learner.units import Unit
from learner.update.credit_assignment import assign_credit
from protocol import names
from protocol.messages import MAX_TEXT
from tests.trajectories import make_trajectory

SOLUTION = "".join(chr(33 + i % 90) for i in range(100))
GHPO = HintFamily(note="{hint}")
SCAF = HintFamily(note="{hint}", shares=(0.25, 0.5, 0.75, 1.0), members=1)


def stage(number, rewards, *, hints=(SOLUTION,), family="0g3", lost=False):
    """Return a group of a family; the reward 1 is a right answer. Groups after the first have other prompts."""
    group = names.stage_id(family, number)
    members = [
        make_trajectory(
            f"{group}.{i}.0",
            group=group,
            reward=reward,
            correct=reward == 1,
            hints=list(hints),
            token_ids=np.arange(9, dtype=np.int32) + 100 * number,
        )
        for i, reward in enumerate(rewards)
    ]
    return FamilyStage(group, "" if lost else group, members)


def play(config, *groups, group_size=8, decode=None):
    """Add groups one after the other as long as the family asks for more; return it and what it asked for."""
    family, asked = TaskFamily("0g3"), []
    for number, rewards in enumerate(groups):
        family.add(stage(number, rewards))
        asked.append(react(config, family, group_size=group_size, decode=decode))
        if not asked[-1]:
            break
    return family, asked


def ids(trajectories):
    return [t.trajectory_id for t in trajectories]


# --- GHPO, arXiv:2507.10628 -------------------------------------------------------------------------------


def test_a_reference_of_a_hundred_characters_gives_hints_of_25_50_and_75():
    assert list(map(len, hint_levels([SOLUTION], GHPO.shares))) == [25, 50, 75]
    assert hint_levels([SOLUTION], GHPO.shares) == [SOLUTION[:n] for n in (25, 50, 75)]


def test_a_group_with_one_success_asks_for_nothing():
    family, asked = play(GHPO, [0, 0, 1, 0])
    assert asked == [[]]
    assert ids(settle(GHPO, family).trained) == ids(family.stages[0].members)


def test_all_fail_at_all_levels_is_four_groups_and_the_last_has_no_advantage():
    family, asked = play(GHPO, *[[0] * 8] * 9)
    assert [len(children) for children in asked] == [8, 8, 8, 0]
    assert [children[0].note for children in asked[:3]] == [SOLUTION[:n] for n in (25, 50, 75)]
    settled = settle(GHPO, family)
    assert ids(settled.trained) == ids(family.stages[3].members)
    assert len(settled.dropped["unhinted"]) == 24
    credit = assign_credit(AlgorithmConfig(advantage={"kind": "group"}), settled.trained)
    assert not credit.advantage.any()


def test_it_stops_at_the_first_level_with_a_success_and_never_mixes_levels():
    family, asked = play(GHPO, [0] * 8, [0] * 8, [0, 1] * 4, [1] * 8)
    assert [len(children) for children in asked] == [8, 8, 0]
    settled = settle(GHPO, family)
    assert {t.group_id for t in settled.trained} == {"0g3r2"}
    unit = settled.unit(family)
    assert [(part.unit_id, len(part.trained)) for part in unit.parts] == [
        ("0g3", 0),
        ("0g3r1", 0),
        ("0g3r2", 8),
    ]
    assert unit.tokens == 3 * 8 * 5


def test_a_cold_start_has_no_hints():
    config = HintFamily(warmup_groups=4)
    assert play(config, [0] * 8)[1] == [[]]
    assert len(play(HintFamily(warmup_groups=3), [0] * 8)[1][0]) == 8


# --- Scaf-GRPO, arXiv:2510.19807 --------------------------------------------------------------------------


def test_the_least_hint_that_works_repairs_one_member():
    """Card C20: after repair the rewards are exactly [1, 0, ..., 0], so A = [(1 - 1/G) / std, ...]."""
    family, asked = play(SCAF, [0] * 8, [0], [1], [1])
    assert [len(children) for children in asked] == [1, 1, 0], "the lower of two levels that work is taken"
    settled = settle(SCAF, family)
    assert sorted(t.return_ for t in settled.trained) == [0.0] * 7 + [1.0]
    assert {t.group_id for t in settled.trained} == {"0g3"}
    assert ids(settled.trained) == [*ids(family.stages[0].members[:7]), "0g3r2.0.0"]
    assert {name: ids(ts) for name, ts in settled.dropped.items()} == {
        "replaced": ["0g3.7.0"],
        "unhinted": ["0g3r1.0.0"],
    }
    credit = assign_credit(AlgorithmConfig(advantage={"kind": "group"}), settled.trained)
    std = (1 / 8 * 7 / 8) ** 0.5
    by_member = credit.advantage.reshape(8, -1)[:, 0]
    np.testing.assert_allclose(by_member, [-1 / 8 / std] * 7 + [7 / 8 / std], atol=2e-5)
    parts = settled.unit(family).parts
    assert [(p.unit_id, len(p.trained), {k: len(v) for k, v in p.dropped.items()}) for p in parts] == [
        ("0g3", 7, {"replaced": 1}),
        ("0g3r1", 0, {"unhinted": 1}),
        ("0g3r2", 1, {}),
    ]


@pytest.mark.parametrize("first", [[1] + [0] * 7, [1] * 8])
def test_with_any_success_the_group_is_what_it_was(first):
    family, asked = play(SCAF, first)
    assert asked == [[]]
    assert settle(SCAF, family).trained == family.stages[0].members


def test_if_no_level_works_the_group_is_left_as_it_is():
    family, _ = play(SCAF, [0] * 8, *[[0]] * 9)
    assert len(family.stages) == 5
    assert ids(settle(SCAF, family).trained) == ids(family.stages[0].members)


def test_hints_of_a_list_accumulate():
    kinds = ["knowledge", "plan", "solution"]
    assert hint_levels(kinds, (0.25, 0.5, 0.75, 1.0)) == [
        "knowledge",
        "knowledge\nplan",
        "knowledge\nplan\nsolution",
    ]
    assert hint_levels([], (0.5,)) == hint_levels([""], (0.5,)) == []


def test_what_is_right_is_what_the_environment_says():
    t = make_trajectory("t", reward=0.4, correct=True)
    assert is_solved(GHPO, t)
    assert not is_solved(GHPO, replace(t, correct=False))
    assert is_solved(GHPO, replace(t, correct=None))
    assert not is_solved(HintFamily(above=0.5), replace(t, correct=None))
    assert is_solved(HintFamily(reward="score", above=0.3), replace(t, correct=False))
    assert not is_solved(HintFamily(reward="other"), t)


def test_without_hints_or_members_nothing_is_asked_for():
    family = TaskFamily("0g3")
    family.add(stage(0, [0, 0], hints=()))
    assert react(GHPO, family, group_size=2, decode=None) == []
    family = TaskFamily("0g3")
    family.add(stage(0, []))
    assert react(GHPO, family, group_size=2, decode=None) == []


def test_a_group_that_is_lost_is_followed_by_the_next_hint_and_the_newest_group_is_trained():
    family, _ = play(GHPO, [0] * 8, [0] * 8)
    family.add(stage(2, [], lost=True))
    assert react(GHPO, family, group_size=8, decode=None)[0].note == SOLUTION[:75]
    family.add(stage(3, [], lost=True))
    assert ids(settle(GHPO, family).trained) == ids(family.stages[1].members)
    assert [part.unit_id for part in settle(GHPO, family).unit(family).parts] == ["0g3", "0g3r1"]


def test_a_member_that_was_played_without_its_note_is_not_trained():
    family = TaskFamily("0g3")
    first = stage(0, [0, 0])
    family.add(first)
    hinted = stage(1, [1, 1])
    plain = replace(hinted.members[1], token_ids=first.members[0].token_ids)
    family.add(replace(hinted, members=[hinted.members[0], plain]))
    settled = settle(GHPO, family)
    assert ids(settled.trained) == ["0g3r1.0.0"]
    assert settled.unit(family).parts[1].dropped == {UNBEGUN: [plain]}
    assert settled.unit(family).tokens == 4 * 5


# --- iGRPO, arXiv:2602.09000 ------------------------------------------------------------------------------

DRAFT = DraftFamily(drafts=4, note="draft: {draft}")


def letters(token_ids):
    return "".join(chr(i) for i in token_ids)


def test_the_best_draft_is_the_note_of_all_answers_and_no_draft_is_trained():
    family, asked = play(DRAFT, [0.1, 0.7, 0.7, 0.2], [1, 0, 0, 1], group_size=4, decode=letters)
    best = family.stages[0].members[1]
    assert asked == [[ChildTask(f"draft: {letters(best.token_ids[4:])}")] * 4, []]
    settled = settle(DRAFT, family)
    assert ids(settled.trained) == ids(family.stages[1].members)
    assert ids(settled.dropped["draft"]) == ids(family.stages[0].members)
    sampled = sum(len(s.members) for s in family.stages)
    assert sampled == 8, "N + G answers for each task"


def test_a_draft_that_is_too_long_for_a_note_is_cut():
    family, asked = play(DRAFT, [1.0], group_size=1, decode=lambda ids: "x" * (2 * MAX_TEXT))
    assert len(asked[0][0].note) <= MAX_TEXT
    assert answer_of(family.stages[0].members[0], letters) == letters([4, 5, 6, 7, 8])


def test_without_drafts_or_answers_nothing_is_trained():
    family, asked = play(DRAFT, [], decode=letters)
    assert asked == [[]]
    assert not settle(DRAFT, family).trained
    family, _ = play(DRAFT, [1.0, 0.0], decode=letters)
    family.add(stage(1, [], lost=True))
    assert react(DRAFT, family, group_size=2, decode=letters) == []
    assert not settle(DRAFT, family).trained


# --- of a recording ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (GHPO, [[0] * 4, [0] * 4, [0, 1, 0, 0]]),
        (SCAF, [[0] * 4, [0], [1]]),
        (SCAF, [[0, 1, 0, 0]]),
        (DRAFT, [[0.5, 0.1], [1, 0, 0, 0]]),
    ],
    ids=["ghpo", "scaf", "scaf-solved", "draft"],
)
def test_a_recorded_family_is_trained_as_it_was(config, groups):
    family, _ = play(config, *groups, group_size=4, decode=letters)
    was = settle(config, family).unit(family)
    stages = {s.unit_id: s for s in family.stages}
    recorded = [
        Unit(part.unit_id, part.unit_id, list(stages[part.unit_id].members))
        for part in was.parts
        if part.trained
    ]
    (again,) = joined(config, recorded)
    assert ids(again.trajectories) == ids(was.trajectories)
    assert [t.group_id for t in again.trajectories] == [t.group_id for t in was.trajectories]
