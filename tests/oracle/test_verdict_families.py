"""A judge that is trained on planted mistakes, and whose verdicts are a reward of its own answers (FAPO, b29)."""

from dataclasses import replace

import numpy as np
import pytest

from envs.planted import NOTE, REWARDS, PlantedSuite, first_mistake, score_judgement, verdict_reward
from launch.run_file.load import METHODS_FOLDER, load, run_files
from learner.advantages import assign_advantages
from learner.errors import CannotRetrain
from learner.families.family import FamilyStage, TaskFamily
from learner.families.reactions import Surroundings, acts_of, joined, react, settle
from learner.families.verdicts import named_step
from learner.rewards import FLAWED, composed, total_of
from learner.settings.families import VerdictFamily
from learner.trajectory import Unit
from protocol import names
from protocol.messages.episodes import Reward, Task
from tests.trajectories import make_trajectory

CONFIG = VerdictFamily(reward="right", truth="working")
LEARNER = load(run_files(METHODS_FOLDER)["fapo"]).learner


def letters(token_ids):
    return "".join(map(chr, token_ids))


def said(group, member, text, rewards, version=0):
    """Return a member that has said a text."""
    t = make_trajectory(f"{group}.{member}.0", group=group, prompt=3, actions=len(text), version=version)
    ids = np.concatenate([t.token_ids[:3], [ord(letter) for letter in text]]).astype(np.int32)
    return replace(t, token_ids=ids, rewards=[Reward(name, 1, value) for name, value in rewards.items()])


def family_of(answers, judgements=None, version=0):
    """Return a family: answers by whether result and working are right, and judgements by member."""
    members = [
        said("0g3", i, f"x{i}=y", {"right": float(right), "working": float(working)}, version)
        for i, (right, working) in enumerate(answers)
    ]
    stages = [FamilyStage("0g3", "0g3", members)]
    if judgements is not None:
        group = names.stage_id("0g3", 1)
        read = [said(group, i, text, {"right": 0.0}) for i, text in enumerate(judgements)]
        stages.append(FamilyStage(group, group, read))
    return TaskFamily("0g3", stages)


def slow_reward(named, truth, steps):
    """The reward of a judgement, case by case as in the authors' program, with 0 for "no mistake"."""
    if not 0 <= named <= steps:
        return -1.0
    if truth == 0:
        return 1.0 if named == 0 else -1.0
    return -1.0 if named == 0 else 1.0 - abs(named - truth) / steps


def test_the_reward_of_a_judgement_against_a_slow_twin():
    """By hand, four steps with the third one wrong: 3 is worth 1, 2 is 1 - 1/4, 1 is 1 - 2/4; no mistake is -1."""
    assert [verdict_reward(named, 3, 4) for named in (3, 2, 1, 0)] == [1.0, 0.75, 0.5, -1.0]
    for steps in range(1, 7):
        for truth in range(steps + 1):
            for named in range(steps + 3):
                assert verdict_reward(named, truth, steps) == slow_reward(named, truth, steps)


def test_only_right_answers_are_judged_and_each_by_its_own_readers():
    family = family_of([(1, 1), (0, 1), (1, 0)])
    children = react(CONFIG, family, Surroundings(3, letters))
    assert [child.note for child in children] == [
        NOTE.replace("{attempt}", text) for text in ("x0=y", "x2=y")
    ]
    twice = react(CONFIG.model_copy(update={"readers": 2}), family, Surroundings(3, letters))
    assert [child.note for child in twice] == [children[0].note] * 2 + [children[1].note] * 2
    assert react(CONFIG, family_of([(0, 0)]), Surroundings(1, letters)) == []
    assert react(CONFIG, family_of([(1, 1)], ["0"]), Surroundings(1, letters)) == []


def test_nobody_judges_before_its_version():
    late = CONFIG.model_copy(update={"from_version": 5})
    assert react(late, family_of([(1, 1)], version=4), Surroundings(1, letters)) == []
    assert len(react(late, family_of([(1, 1)], version=5), Surroundings(1, letters))) == 1
    early = settle(late, family_of([(1, 0)], version=4), letters)
    assert total_of(early.trained[0], FLAWED) == 0.0, "who is not judged is not blamed"


def test_the_penalty_turns_with_the_share_of_right_answers():
    """Card b29, penalty 1: rewards 1, 1, 0 (flawed), -1 have the mean 1/4, so the flawed one is 1/4 below it; of
    1, 0 (flawed), -1, -1 the mean is -1/4, so it is 1/4 above it."""
    learner = LEARNER
    for answers, verdicts, gap in (
        ([(1, 1), (1, 1), (1, 0), (0, 0)], ["0", "0", "2"], -0.25),
        ([(1, 1), (1, 0), (0, 0), (0, 0)], ["0", "2"], 0.25),
    ):
        family = family_of(answers, verdicts)
        # As in a run, where rewards are composed when a group comes, before it is judged.
        family.stages[0].members[:] = composed(learner.reward, family.stages[0].members)
        settled = settle(CONFIG, family, letters)
        assert [len(ts) for ts in settled.dropped.values()] == [len(verdicts)]
        members = settled.trained
        returns = [t.return_ for t in members]
        flawed = answers.index((1, 0))
        assert returns[flawed] == 0.0
        assert returns[flawed] - np.mean(returns) == pytest.approx(gap)
        credit = assign_advantages(learner.algorithm, members)
        first = sum(len(t) for t in members[:flawed]) + members[flawed].prompt_tokens
        assert np.sign(credit.advantage[first]) == np.sign(gap)


def test_votes_decide_and_what_cannot_be_read_does_not_count():
    three = CONFIG.model_copy(update={"readers": 3})
    family = family_of([(1, 0), (1, 1), (1, 1)], ["2", "1", "0", "nus", "0", "3", "no", "?", ""])
    lost = [total_of(t, FLAWED) for t in settle(three, family, letters).trained]
    assert lost == [-1.0, 0.0, 0.0]
    # The weight 0 of the truth takes it out of the return, and not out of the comparison.
    family.stages[0].members[:] = composed(LEARNER.reward, family.stages[0].members)
    assert acts_of(three, family, letters) == {
        "family/readable_share": [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0],
        "family/flawed_share": [1.0, 0.0],
        "family/verdict_right_share": [1.0, 1.0],
    }


def test_a_judgement_that_did_not_come_blames_nobody():
    family = family_of([(1, 0), (1, 0)], ["2"])
    assert [total_of(t, FLAWED) for t in settle(CONFIG, family, letters).trained] == [-1.0, 0.0]


def test_a_recorded_family_is_valued_as_it_was():
    """Its judgements are among the units that were not trained. Lost ones blame nobody."""
    family = family_of([(1, 1), (0, 0), (1, 0)], ["0", "1"])
    first, judgements = (Unit(s.unit_id, s.unit_id, list(s.members)) for s in family.stages)
    for others, lost in (([judgements], [0.0, 0.0, -1.0]), ([], [0.0, 0.0, 0.0])):
        (again,) = joined(CONFIG, [first], others=others, decode=letters)
        assert [total_of(t, FLAWED) for t in again.trajectories] == lost
        assert [part.unit_id for part in again.parts] == ["0g3", "0g3r1"][: 1 + len(others)]
    with pytest.raises(CannotRetrain, match="nothing of it would be now"):
        joined(CONFIG, [Unit("0g3", "0g3", [])], decode=letters)


def test_a_pinned_judge_is_asked_and_what_the_policy_wrote_in_its_place_is_left_out():
    pinned = CONFIG.model_copy(update={"judge": "frozen"})
    family = family_of([(1, 1), (1, 0)])
    children = react(pinned, family, Surroundings(2, letters))
    assert [child.policy for child in children] == ["frozen"] * 2
    group = names.stage_id("0g3", 1)
    own = [said(group, member, "1", {"right": 0.0}) for member in range(2)]
    noted = [replace(t, token_ids=np.concatenate([[9], t.token_ids[1:]])) for t in own]
    by_judge = [replace(t, origin="taught") for t in noted]
    tasks = [
        Task(
            task_id=names.task_id(group, n),
            env="e",
            group_id=group,
            group_size=2,
            note=child.note,
            policy=child.policy,
        )
        for n, child in enumerate(children)
    ]
    first = Unit("0g3", "0g3", list(family.stages[0].members))
    for members, lost in (
        (by_judge, [-1.0, -1.0]),
        ([by_judge[0], noted[1]], [-1.0, 0.0]),
        (noted, [0.0, 0.0]),
    ):
        (again,) = joined(pinned, [first], others=[Unit(group, group, members)], tasks=tasks, decode=letters)
        assert [total_of(t, FLAWED) for t in again.trajectories] == lost


def test_numbers_that_could_mean_something_else_are_none():
    assert [named_step(text) for text in ("2", "It is step 12.", "a\n0\n", "1 of 3", "1.5", "99999", "")] == [
        *(2, 12, 0),
        *(None, None, None, None),
    ]


@pytest.fixture(scope="module")
def suite():
    suite = PlantedSuite(longest=4, planted=0.5, seed=1)
    yield suite
    suite.scorer.close_now()


def test_planted_mistakes_are_where_the_task_says(suite):
    assert suite.facts().reward_names == REWARDS
    truths = []
    for index in range(200):
        entry = suite.scorer.entry_now(index, "train")
        planted = suite.planted_in(entry, index)
        assert (planted is None) == (index % 2 == 0)
        if planted is not None:
            working = planted.attempt.partition("=")[0]
            assert first_mistake(working, entry.answer) == planted.truth
            assert score_judgement(str(planted.truth), planted) == 1.0
            truths.append(planted.truth)
    assert 0.35 < np.mean([truth == 0 for truth in truths]) < 0.65
    assert set(truths) == {0, 1, 2, 3, 4}


def test_a_planted_mistake_is_asked_for_as_a_family_asks(suite):
    entry = suite.scorer.entry_now(1, "train")
    planted = suite.planted_in(entry, 1)
    note = CONFIG.note.replace("{attempt}", planted.attempt)
    assert suite.opening(entry, planted)[0]["content"] == f"{entry.fields['word']}\n\n{note}"
