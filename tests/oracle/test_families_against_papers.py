"""Families of groups: what the papers' cards say of hints and drafts, and what is trained of each family."""

from dataclasses import replace

import numpy as np
import pytest

from learner.advantages import assign_advantages
from learner.families.branching import (
    branch_probability,
    branch_turns,
    chosen,
    prefix_of,
    shared_prefix_advantages,
    surprisal,
)
from learner.families.family import UNBEGUN, ChildTask, FamilyStage, TaskFamily
from learner.families.notes import answer_of, hint_levels, is_solved
from learner.families.reactions import Surroundings, joined, react, settle
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.families import BranchFamily, DraftFamily, HintFamily
from learner.trajectory import Unit
from protocol import names
from protocol.messages.episodes import Reward, Task, Turn
from protocol.messages.fields import MAX_TEXT
from tests.trajectories import make_trajectory, make_turns

SOLUTION = "".join(chr(33 + i % 90) for i in range(100))
GHPO = HintFamily(note="{hint}")
SCAF = HintFamily(note="{hint}", shares=(0.25, 0.5, 0.75, 1.0), members=1)
PAIR = HintFamily(note="{hint}", shares=(0.5, 1.0), members=2)


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
        family.add_stage(stage(number, rewards))
        asked.append(react(config, family, Surroundings(group_size, decode)))
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
    credit = assign_advantages(AlgorithmConfig(advantage={"kind": "group"}), settled.trained)
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
    credit = assign_advantages(AlgorithmConfig(advantage={"kind": "group"}), settled.trained)
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
    family.add_stage(stage(0, [0, 0], hints=()))
    assert react(GHPO, family, Surroundings(2, None)) == []
    family = TaskFamily("0g3")
    family.add_stage(stage(0, []))
    assert react(GHPO, family, Surroundings(2, None)) == []


def test_a_group_that_is_lost_is_followed_by_the_next_hint_and_the_newest_group_is_trained():
    family, _ = play(GHPO, [0] * 8, [0] * 8)
    family.add_stage(stage(2, [], lost=True))
    assert react(GHPO, family, Surroundings(8, None))[0].note == SOLUTION[:75]
    family.add_stage(stage(3, [], lost=True))
    assert ids(settle(GHPO, family).trained) == ids(family.stages[1].members)
    assert [part.unit_id for part in settle(GHPO, family).unit(family).parts] == ["0g3", "0g3r1"]


def test_a_member_that_was_played_without_its_note_is_not_trained():
    family = TaskFamily("0g3")
    first = stage(0, [0, 0])
    family.add_stage(first)
    hinted = stage(1, [1, 1])
    plain = replace(hinted.members[1], token_ids=first.members[0].token_ids)
    family.add_stage(replace(hinted, members=[hinted.members[0], plain]), [ChildTask("a hint")] * 2)
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
    family.add_stage(stage(1, [], lost=True))
    assert react(DRAFT, family, Surroundings(2, letters)) == []
    assert not settle(DRAFT, family).trained


# --- of a recording ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (GHPO, [[0] * 4, [0] * 4, [0, 1, 0, 0]]),
        (SCAF, [[0] * 4, [0], [1]]),
        (SCAF, [[0, 1, 0, 0]]),
        (DRAFT, [[0.5, 0.1], [1, 0, 0, 0]]),
        (BranchFamily(rollouts=2), [[0, 1], [1, 0]]),
    ],
    ids=["ghpo", "scaf", "scaf-solved", "draft", "branch"],
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


@pytest.mark.parametrize(
    ("config", "begun"),
    [(GHPO, [[0] * 4, [0, 1, 0, 1]]), (PAIR, [[0] * 4, [1, 1]]), (DRAFT, [[0.5, 0.1], [1, 0, 0, 0]])],
    ids=["ghpo", "scaf", "draft"],
)
def test_a_recorded_member_that_was_played_without_its_note_stays_out(config, begun):
    family, asked = play(config, begun[0], group_size=len(begun[1]), decode=letters)
    first, second = family.stages[0], stage(1, begun[1])
    # An old actor has played the first member from the plain prompt.
    members = [replace(second.members[0], token_ids=first.members[0].token_ids), *second.members[1:]]
    members = [replace(t, group_size=len(members)) for t in members]
    family.add_stage(replace(second, members=members), asked[0])
    was = settle(config, family)
    tasks = [
        Task(task_id=f"0g3r1.{i}", env="e", group_id="0g3r1", group_size=len(members), note=child.note)
        for i, child in enumerate(asked[0])
    ]
    units = [Unit("0g3", "0g3", list(first.members)), Unit("0g3r1", "0g3r1", members)]
    in_batch = [u for u in units if any(t.trajectory_id in ids(u.trajectories) for t in was.trained)]
    others = [u for u in units if u not in in_batch]
    (again,) = joined(config, in_batch, others=others, tasks=tasks)
    assert ids(again.trajectories) == ids(was.trained)
    assert members[0].trajectory_id not in ids(again.trajectories)
    assert ids(again.parts[-1].dropped[UNBEGUN]) == [members[0].trajectory_id]
    (fooled,) = joined(config, in_batch, others=others)
    assert ids(fooled.trajectories) != ids(was.trained), "without the tasks it cannot be seen"


# --- ARPO, arXiv:2507.19849 -------------------------------------------------------------------------------


def episode(name, logps, *, reward=0.0, group="0g3", seed=0):
    """Return a trajectory with an answer for each list of log-probabilities, one observation between two."""
    t = make_turns(name, [{} for _ in logps], group=group, lengths=list(map(len, logps)))
    behaviour = np.zeros(len(t), np.float32)
    for turn, values in zip([turn for turn in t.turns if turn.action], logps, strict=True):
        behaviour[turn.start : turn.end] = values
    ids = np.random.default_rng(seed + sum(name.encode())).integers(0, 99, len(t)).astype(np.int32)
    return replace(t, logp_behaviour=behaviour, token_ids=ids, rewards=[Reward("r", 1, reward)])


def parents(count=8, turns=3):
    return [episode(f"0g3.{i}.0", [[-1.0, -1.0]] * turns, seed=7 * i) for i in range(count)]


def branches_of(config, members, *, group_size=16, seed=0, room=999):
    family = TaskFamily("0g3", [FamilyStage("0g3", "0g3", members)])
    return react(config, family, Surroundings(group_size, None, room, seed))


def test_the_chance_of_a_branch():
    """Card A2: Pr = clip(1/2 + w dH, 0, 1); with w = .2 a change of 1 moves it from .5 to .7."""
    assert [branch_probability(x, 0.2) for x in (0.0, 1.0, -1.0, 9.0, -9.0)] == [0.5, 0.7, 0.3, 1.0, 0.0]
    members = parents(1, turns=2)
    for config in (BranchFamily(weight=0.0), BranchFamily(where="anywhere", weight=9.0)):
        drawn = [len(list(chosen(config, members, np.random.default_rng([s, 3])))) for s in range(2000)]
        assert np.mean(drawn) == pytest.approx(0.5, abs=0.04)


def test_uncertainty_is_the_mean_surprisal_of_the_first_tokens():
    t = episode("t", [[-1.0, -1.0], [-3.0, -1.0, -9.0]])
    assert surprisal(t, 3, 2) == 2.0
    assert surprisal(t, 3, 20) == pytest.approx(13 / 3)
    certain = BranchFamily(weight=1.0, tokens=2)
    for rises, drawn in ((-3.0, True), (3.0, False)):
        members = [episode("0g3.0.0", [[-4.0, -4.0], [-4.0 + rises] * 2])]
        members = [replace(members[0], logp_behaviour=np.minimum(members[0].logp_behaviour, 0))]
        for seed in range(20):
            assert bool(list(chosen(certain, members, np.random.default_rng(seed)))) == drawn


def test_a_task_never_has_more_than_its_budget_and_at_most_one_branch_a_path_and_round():
    config = BranchFamily(rollouts=8, weight=0.0)
    for seed in range(30):
        children = branches_of(config, parents(), seed=seed)
        assert len(children) == 8, "16 samples in all"
        starts = [(c.start.parent, len(c.start.turns)) for c in children if c.start]
        assert len(starts) == len(set(starts))
        assert branches_of(config, parents(), seed=seed) == children, "the same after a restart"
    rounds = [len(c.start.turns) for c in children if c.start]
    assert rounds == sorted(rounds), "turn by turn"


def test_what_no_branch_was_drawn_for_is_sampled_from_the_prompt():
    assert branches_of(BranchFamily(rollouts=8), parents(turns=1)) == [ChildTask()] * 8
    assert branches_of(BranchFamily(rollouts=8), []) == []
    # A prefix that leaves no room for an answer is not used.
    assert branches_of(BranchFamily(weight=0.0, rollouts=8), parents(), room=5) == [ChildTask()] * 8


def test_a_prefix_ends_before_an_answer_and_holds_whole_turns():
    t = parents(1)[0]
    start = prefix_of(t, 3)
    assert np.frombuffer(start.token_ids, "<i4").tolist() == t.token_ids[: t.turns[3].start].tolist()
    assert (start.turns, start.parent) == (t.turns[:3], t.trajectory_id)
    assert branch_turns(t) == [3, 5]
    assert branch_turns(replace(t, turns=[*t.turns[:4], replace_turn(t.turns[4], back=2), t.turns[5]])) == []


def replace_turn(turn, **changes):
    return Turn(**({name: getattr(turn, name) for name in turn.__struct_fields__} | changes))


def child_of(parent, turn, name, reward):
    """Return a branch of a parent before an action turn, as the actor plays it."""
    end = parent.turns[turn].start
    t = episode(name, [[-1.0, -1.0]] * 3, reward=reward, seed=hash(name) % 99)
    mask = t.action_mask.copy()
    mask[:end] = False
    turns = [replace_turn(each, action=each.action and each.index >= turn) for each in t.turns]
    ids = np.concatenate([parent.token_ids[:end], t.token_ids[end:] + 100])
    parts = {"action_mask": mask, "turns": turns, "token_ids": ids.astype(np.int32)}
    return replace(t, parent=parent.trajectory_id, **parts)


def test_of_two_parents_with_one_opening_the_one_that_was_branched_is_credited():
    parent, twin = parents(2)
    twin = replace(twin, token_ids=parent.token_ids)
    child = child_of(twin, 3, "0g3r1.0.0", 1.0)
    for tree in ([parent, twin, child], [twin, child, parent]):
        rows = np.split(
            shared_prefix_advantages(tree, np.array([2.0, 2.0, 2.0]), shared="sum"),
            np.cumsum([len(t) for t in tree])[:-1],
        )
        credit = {t.trajectory_id: row[t.turns[1].start] for t, row in zip(tree, rows, strict=True)}
        assert (credit[twin.trajectory_id], credit[parent.trajectory_id]) == (4.0, 2.0)
    alone = shared_prefix_advantages([parent, child], np.array([2.0, 7.0]), shared="sum")
    assert set(alone[: len(parent)]) == {2.0}, "the parent has failed, so nobody trains the prefix"


def test_a_shared_prefix_is_credited_with_the_mean_or_the_sum_of_all_that_share_it():
    """The tree: a parent, a branch before its second answer, and a branch before its third."""
    parent, other = parents(2)
    tree = [parent, child_of(parent, 3, "0g3r1.0.0", 1.0), child_of(parent, 5, "0g3r1.1.0", 0.5), other]
    values = np.array([0.5, -1.0, 2.0, 7.0])
    expected = {"mean": [0.5, 1.25, 0.5], "sum": [1.5, 2.5, 0.5]}
    for shared, (first, second, third) in expected.items():
        rows = np.split(
            shared_prefix_advantages(tree, values, shared=shared), np.cumsum([len(t) for t in tree])[:-1]
        )
        by_turn = [rows[0][turn.start] for turn in parent.turns if turn.action]
        assert by_turn == [first, second, third]
        assert set(rows[1][tree[1].action_mask]) == {-1.0}
        assert set(rows[3]) == {7.0}


def test_the_sum_is_the_gradient_of_training_every_copy():
    parent = parents(1)[0]
    tree = [parent, *(child_of(parent, 3, f"0g3r1.{i}.0", float(i)) for i in range(3))]
    values = np.array([0.25, -1.0, 2.0, 0.5])
    score = np.random.default_rng(5).standard_normal(100 + 100)  # d log p / d theta of each token id
    shared = shared_prefix_advantages(tree, values, shared="sum")
    mask = np.concatenate([t.action_mask for t in tree])
    ids = np.concatenate([t.token_ids for t in tree])
    once = (shared * score[ids])[mask].sum()
    own = parent.action_mask[: parent.turns[3].start]
    copies = sum(
        value * score[t.token_ids][np.concatenate([own, t.action_mask[len(own) :]])].sum()
        for t, value in zip(tree, values, strict=True)
    )
    assert once == pytest.approx(copies)


def test_branches_and_whole_episodes_are_one_group():
    config = BranchFamily(rollouts=2, weight=0.0)
    parent, other = parents(2)
    family = TaskFamily("0g3", [FamilyStage("0g3", "0g3", [parent, other])])
    child = replace(child_of(parent, 3, "0g3r1.0.0", 1.0), parent="")
    wrong = child_of(other, 3, "0g3r1.1.0", 1.0)
    children = [ChildTask(start=prefix_of(parent, 3)), ChildTask(start=prefix_of(parent, 5))]
    family.add_stage(FamilyStage("0g3r1", "0g3r1", [child, wrong]), children)
    settled = settle(config, family)
    assert ids(settled.trained) == ["0g3.0.0", "0g3.1.0", "0g3r1.0.0"]
    assert [t.parent for t in settled.trained] == ["", "", "0g3.0.0"], "it is known from the task"
    assert {t.group_id for t in settled.trained} == {"0g3"}
    assert ids(settled.unit(family).parts[1].dropped[UNBEGUN]) == ["0g3r1.1.0"]
    algorithm = AlgorithmConfig(advantage={"kind": "group", "scale": "none"}, shared_prefix="mean")
    credit = assign_advantages(algorithm, settled.trained).advantage[: len(parent)]
    third = 1 / 3
    assert credit[parent.turns[1].start] == pytest.approx((-third + 2 * third) / 2)
    assert credit[parent.turns[3].start] == pytest.approx(-third)
