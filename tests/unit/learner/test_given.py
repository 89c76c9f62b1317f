"""Which given conversations a step gets, what an update sees of them, and which settings go together."""

from itertools import chain

import numpy as np
import pytest

from learner.advantages import TokenAdvantages
from learner.curriculum import Curriculum
from learner.given import Conversation, as_trajectory, given_conversations
from learner.metrics import rollout_metrics
from learner.settings.given import GivenConfig
from learner.settings.learner import LearnerConfig, ReplayConfig
from learner.settings.rules import contradictions
from learner.update.batch import make_batch
from tests.trajectories import make_trajectory

TALK = Conversation("a.jsonl:1", np.arange(7, dtype=np.int32), np.array([0, 0, 1, 1, 0, 1, 1], bool))


def config(share=1.0, **settings):
    return LearnerConfig(given=GivenConfig(share=share), **settings)


def test_each_epoch_has_every_conversation_once_and_a_restart_gets_the_same():
    talks = [Conversation(f"a:{n}", np.array([n, 1], np.int32), np.array([False, True])) for n in range(6)]
    made = [
        given_conversations(config(batch_trajectories=4, group_size=2), lambda: talks, seed=3)
        for _ in range(2)
    ]
    dealt = [[int(t.token_ids[0]) for t in made[0].of_step(step)] for step in range(6)]
    numbers = list(chain(*dealt))
    assert all(sorted(numbers[at : at + 6]) == list(range(6)) for at in range(0, 24, 6))
    assert numbers[:6] != numbers[6:12]
    assert [int(t.token_ids[0]) for t in made[1].of_step(4)] == dealt[4]
    names = [t.trajectory_id for step in range(6) for t in made[0].of_step(step)]
    assert len(set(names)) == len(names)
    assert given_conversations(LearnerConfig(), pytest.fail, seed=3) is None


def test_the_turns_of_a_conversation_are_its_questions_and_answers():
    t = as_trajectory(TALK, "given-0.0")
    assert [(turn.start, turn.end, turn.action) for turn in t.turns] == [
        (0, 2, False), (2, 4, True), (4, 5, False), (5, 7, True),
    ]  # fmt: skip
    assert (t.origin, t.action_tokens, t.window_tokens) == ("given", 4, 4)


def test_given_tokens_are_imitated_and_carry_no_policy_gradient():
    own = make_trajectory("own", version=0)
    alone = TokenAdvantages.of_tokens(np.ones(len(own)), np.ones(len(own)))
    assert alone.with_none_behind(0) is alone
    none = alone.with_none_behind(len(TALK.learnt))
    batch = make_batch([own, as_trajectory(TALK, "given-0.0")], none, current_version=0, max_policy_lag=4)
    assert batch.trained.tolist() == [5, 0]
    assert batch.count(batch.columns["imitation_mask"] > 0).tolist() == [0, 4]
    assert (batch.columns["imitation_mask"][len(own) :] > 0).tolist() == TALK.learnt.tolist()
    assert not batch.columns["fresh"][len(own) :].any()
    assert batch.seen_mask.tolist() == [*own.action_mask, *TALK.learnt]


def test_the_lengths_of_a_step_are_those_of_what_was_sampled():
    own = make_trajectory("own", version=0)
    metrics = rollout_metrics([own], [own, as_trajectory(TALK, "given-0.0")])
    assert metrics["rollout/length_trained_mean_tokens"] == own.window_tokens != 4


@pytest.mark.parametrize(
    ("share", "train_on", "given", "units"),
    [
        (1.0, "groups", 32, 0),
        (0.25, "groups", 8, 3),
        (0.01, "groups", 8, 3),
        (0.99, "groups", 24, 1),
        (0.5, "trajectories", 16, 16),
        (1.0, "trajectories", 32, 0),
    ],
)
def test_what_is_not_given_is_sampled_in_whole_units(share, train_on, given, units):
    made = config(share, batch_trajectories=32, group_size=8, train_on=train_on)
    assert (made.given_trajectories, made.units_per_batch) == (given, units)
    tasks = Curriculum("gym", made).refill(version=0, lockstep=False)
    assert bool(tasks) == bool(units)


def test_what_cannot_be_together_is_refused_with_both_names():
    def refusals(**settings):
        return [text for text in contradictions(config(**settings)) if "given" in text]

    assert not refusals()
    assert not refusals(share=0.5)
    assert "learner.given cannot be together with learner.replay" in refusals(replay=ReplayConfig())[0]
    assert 'train_on = "groups"' in refusals(train_on="windows")[0]
    assert "batch has a single group" in refusals(share=0.5, batch_trajectories=8, group_size=8)[0]
