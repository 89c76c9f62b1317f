"""AMPO (arXiv:2510.02227): what its card says of answers that teachers wrote to tasks without success."""

import numpy as np
import pytest

from learner.advantages import trajectory_advantages
from learner.given import Conversation, TaughtAnswers
from learner.settings.advantages import GroupAdvantage
from learner.settings.taught import TaughtConfig
from learner.trajectory import Unit
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
