"""AMPO (arXiv:2510.02227): what its card says of answers that teachers wrote to tasks without success."""

from dataclasses import replace

import numpy as np
import pytest

from learner.advantages import trajectory_advantages
from learner.families.family import FamilyStage, TaskFamily
from learner.families.reactions import Surroundings, acts_of, joined, react, settle
from learner.given import Conversation, TaughtAnswers, TaughtMembers
from learner.settings.advantages import GroupAdvantage
from learner.settings.families import TaughtFamily
from learner.settings.taught import TaughtConfig
from learner.trajectory import Unit
from protocol import names
from protocol.messages.episodes import Task, Turn
from tests.trajectories import make_trajectory

G = 8
PROMPTS = {
    name: np.array(ids, np.int32) for name, ids in {"hard": [1, 2, 3, 4], "easy": [1, 2, 3, 5]}.items()
}


def group(name, returns):
    made = [make_trajectory(f"{name}.{n}", group=name, reward=r, group_size=G) for n, r in enumerate(returns)]
    for t in made:
        t.token_ids[:4] = PROMPTS[name]
    return Unit(name, name, made)


def answer(name, *tokens):
    ids = np.concatenate([PROMPTS[name], np.array(tokens, np.int32)])
    return Conversation(f"answers.jsonl:{tokens[0]}", ids, np.arange(len(ids)) >= 4)


ANSWERS = [answer("hard", 10, 0), answer("hard", 20, 0), answer("hard", 30, 0, 0), answer("hard", 40, 0)]
LIKELY = {10: -3.0, 20: -0.5, 30: -0.7, 40: -0.7}
"""Mean log-probability of each teacher's answer under the policy, by its first token."""


def likelihood(trajectories):
    return [LIKELY[int(t.token_ids[4])] for t in trajectories]


def first_tokens(batch):
    return [int(t.token_ids[4]) for t in batch if t.origin == "taught"]


@pytest.mark.parametrize(
    ("members", "kept"),
    # r_p = exp(mean log p) decides; where it is equal, the shorter answer.
    [(1, [20]), (2, [20, 40]), (3, [20, 40, 30]), (7, [20, 40, 30, 10])],
)
def test_the_answers_that_the_policy_finds_likeliest_replace_members_of_a_failed_group(members, kept):
    """Card 44: keep top k = min(k0, available); G - k student rollouts remain."""
    taught = TaughtAnswers(TaughtConfig(members=members), ANSWERS)
    unit = group("hard", [0.0] * G)
    batch = taught.teach([unit], likelihood)
    assert first_tokens(batch) == kept
    assert len(batch) == G
    assert batch[: G - len(kept)] == unit.trajectories[: G - len(kept)]
    assert {(t.group_id, t.group_size, t.return_, t.correct) for t in batch[G - len(kept) :]} == {
        ("hard", G, 1.0, True)
    }
    assert len(unit.trajectories) == G, "the unit that is committed stays as it was delivered"


def test_advantages_are_those_of_the_augmented_group():
    """Card 44: R - mean, without the deviation."""
    batch = TaughtAnswers(TaughtConfig(), ANSWERS).teach([group("hard", [0.0] * G)], likelihood)
    advantages, _ = trajectory_advantages(GroupAdvantage(scale="none"), batch)
    np.testing.assert_allclose(advantages, [-0.25] * 6 + [0.75] * 2)


def test_a_group_with_a_success_or_without_an_answer_is_untouched():
    """Card 44: success in the group -> the batch is untouched."""
    taught = TaughtAnswers(TaughtConfig(), ANSWERS)
    solved, other = group("hard", [0.0] * 7 + [1.0]), group("easy", [0.0] * G)
    assert not taught.can_teach(solved.trajectories)
    assert not taught.can_teach(other.trajectories)
    assert not taught.can_teach([])
    asked = []
    batch = taught.teach([solved, other], lambda ts: asked.append(ts) or [])
    assert batch == [*solved.trajectories, *other.trajectories]
    assert not asked, "the policy is asked for nothing"


def test_an_answer_that_stands_twice_is_one_answer():
    taught = TaughtAnswers(TaughtConfig(members=3), [ANSWERS[0], ANSWERS[0], ANSWERS[1]])
    assert taught.can_teach(group("hard", [0.0] * G).trajectories)
    assert first_tokens(taught.teach([group("hard", [0.0] * G)], likelihood)) == [20, 10]


LIVE = TaughtFamily(teachers=["big", "other", "big"], members=2)
AROUND = Surroundings(G, lambda ids: "", 999)


def written(token, right, member, length=2, score=None):
    """Return the answer of a teacher, as it comes from the broker."""
    ids = np.concatenate([PROMPTS["hard"], np.array([token, *[0] * (length - 1)], np.int32)])
    made = make_trajectory(f"0g3r1.{member}", group="0g3r1", reward=float(right) if score is None else score)
    mask = np.arange(len(ids)) >= 4
    arrays = {"token_ids": ids, "action_mask": mask, "logp_behaviour": np.zeros(len(ids), np.float32)}
    turns = [Turn(0, 0, 4, False), Turn(1, 4, len(ids), True)]
    versions = np.full(len(ids), -1, np.int32)
    return replace(made, **arrays, policy_version=versions, turns=turns, origin="taught", correct=right)


def first_stage(returns):
    return FamilyStage(
        "0g3", "0g3", [replace(t, group_id="0g3") for t in group("hard", returns).trajectories]
    )


def live(*answers, returns=(0.0,) * G):
    family = TaskFamily("0g3", [first_stage(returns)])
    children = react(LIVE, family, AROUND)
    family.add_stage(FamilyStage("0g3r1", "0g3r1", answers), children)
    return family, children


def test_each_teacher_is_asked_for_a_group_that_nobody_solved_and_for_no_other():
    """Card 44, trigger: success count = 0."""
    family, children = live()
    assert [child.policy for child in children] == ["big", "other", "big"]
    assert react(LIVE, family, AROUND) == [], "once"
    solved = TaskFamily("0g3", [first_stage([0.0] * 7 + [1.0])])
    assert react(LIVE, solved, AROUND) == []
    assert react(LIVE, TaskFamily("0g3", [FamilyStage("0g3")]), AROUND) == []


def test_right_answers_of_live_teachers_take_places_the_likeliest_first():
    """Card 44: replaced rewards are raised to at least 1; keep top k; G - k student rollouts remain."""
    answers = (
        written(10, True, 0),
        written(20, True, 1, score=0.4),
        written(30, False, 2),
        written(40, True, 3),
    )
    family, _ = live(*answers)
    settled = settle(LIVE, family)
    assert [int(t.token_ids[4]) for t in settled.dropped["untaught"]] == [30]
    unit = settled.unit(family)
    batch = TaughtMembers(LIVE.members).teach([unit], likelihood)
    assert len(batch) == G
    assert first_tokens(batch) == [20, 40]
    assert [t.return_ for t in batch[-2:]] == [1.0, 1.0]
    assert {(t.group_id, t.group_size) for t in batch} == {("0g3", G)}
    assert [len(part.trained) for part in unit.parts] == [G, 3], "what is committed is what was delivered"
    shown = acts_of(LIVE, family, AROUND.decode)
    assert shown == {"family/taught_right_share": [1.0, 1.0, 0.0, 1.0], "family/taught_group_share": [1.0]}


def test_without_a_right_answer_the_group_stays_as_it_was():
    family, _ = live(written(30, False, 0))
    settled = settle(LIVE, family)
    assert list(settled.trained) == list(family.stages[0].members)
    assert TaughtMembers(2).teach([settled.unit(family)], likelihood) == list(settled.trained)


def test_an_answer_that_the_policy_wrote_in_place_of_a_teacher_is_left_out():
    """An actor before protocol 4.7 knows no teacher, and a teacher's answer may come where the policy was asked."""
    own = replace(written(10, True, 0), origin="own", policy_version=np.zeros(6, np.int32))
    family, children = live(own)
    assert family.stages[1].members == []
    assert family.stages[1].unbegun == [own]
    assert not replace(children[0], policy="").is_begun_by(written(10, True, 0), own)


def test_a_recorded_step_has_the_same_answers():
    family, children = live(written(10, True, 0), written(40, True, 1))
    tasks = [
        Task(task_id=names.task_id("0g3r1", n), env="e", group_id="0g3r1", group_size=3, policy=child.policy)
        for n, child in enumerate(children)
    ]
    units = [Unit(s.group_id, s.group_id, s.members) for s in family.stages]
    (again,) = joined(LIVE, units, tasks=tasks)
    teach = TaughtMembers(LIVE.members).teach
    recorded = teach([again], likelihood)
    assert (
        first_tokens(recorded)
        == first_tokens(teach([settle(LIVE, family).unit(family)], likelihood))
        == [40, 10]
    )
