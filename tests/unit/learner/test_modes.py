"""Members of a group that are forced into a mode: which ones, what their tasks say, and what cannot be beside them."""

import pytest

from learner.curriculum import Curriculum
from learner.intake.session import BrokerRefused, minor_of, refuse_older_broker
from learner.settings.learner import EvaluationConfig, LearnerConfig
from learner.settings.rules import contradictions
from protocol.codec import MINOR
from protocol.messages.episodes import TurnMark
from tests.trajectories import make_trajectory

OPENINGS = {"fast": "=", "tool": "call "}


def learner(group=(), **settings):
    modes = {"kind": "modes", "reward": "answer", "openings": OPENINGS, "cheap": "fast", "each": 2}
    whole = {
        "group_size": 6,
        "batch_trajectories": 12,
        "max_policy_lag": 0,
        "reward": {"group": modes | dict(group)},
    }
    return LearnerConfig.model_validate(whole | settings)


def complaints(config):
    return [*config.all_contradictions("learner"), *contradictions(config)]


def test_the_last_members_of_each_group_are_opened_in_each_mode():
    tasks = Curriculum("e", learner()).refill(version=0, lockstep=False)
    assert [task.opening for task in tasks] == ["", "", "=", "=", "call ", "call "] * 2
    assert {minor_of(task) for task in tasks} == {0, 8}
    assert MINOR >= 8


def test_evaluations_choose_their_mode():
    tasks = Curriculum("e", learner()).evaluation("before", 0, EvaluationConfig(tasks=7))
    assert {task.opening for task in tasks} == {""}


def test_an_older_broker_would_lose_the_openings():
    tasks = Curriculum("e", learner()).refill(version=0, lockstep=False)
    with pytest.raises(
        BrokerRefused, match=r"cannot begin answers; .* of kind \"modes\" need 4\.8: start a broker"
    ):
        refuse_older_broker(tasks, 7, "the broker")
    refuse_older_broker(tasks, 8, "the broker")


def test_a_forced_answer_says_nothing_of_how_hard_a_task_is():
    selection = {"kind": "near", "tasks": 4}
    it = Curriculum("e", learner(selection=selection))
    group = it.refill(version=0, lockstep=False)[0].group_id
    marked = [("", 1.0), ("tool", 0.0), ("fast", 0.0), ("tool", 1.0)]
    members = [
        make_trajectory(
            f"{group}.{m}.0", group=group, reward=r, group_size=6, marks=[TurnMark("mode", 1, mode)]
        )
        for m, (mode, r) in enumerate(marked)
    ]
    it.note_ended(group, members)
    # The third was forced into "fast". The fourth should have been, and was not: it chose.
    assert it.stats.attempts.sum() == 3
    assert it.stats.right.sum() == 2


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            learner(group_size=4),
            "forces 4 members of a group, 2 into each of 2 modes, but .* raise group_size to 5",
        ),
        (learner({"openings": {"fast": "="}}), "has 1 modes; there is nothing to choose"),
        (learner({"cheap": "slow"}), r'cheap is "slow", which has no opening \(modes: fast, tool\)'),
        (learner({"openings": {"fast": "=", "tool": "=="}}), 'openings.tool begins with that of "fast"'),
        (learner({"openings": {"fast": "=", "tool": "="}}), "so nobody can tell their answers apart"),
        (learner(train_on="trajectories"), "the reward needs the whole group"),
        (learner(replay={"rule": "success"}), "learner.replay is set beside learner.reward.group of kind"),
        (learner(selection={"kind": "population"}), 'learner.selection.kind is "population" beside'),
        (learner(family={"kind": "draft"}), "learner.reward.group is set with "),
        (learner(lane={}), "learner.reward.group is set beside"),
    ],
)
def test_what_cannot_act_is_refused(config, said):
    with pytest.raises(AssertionError, match=said):
        assert not complaints(config)


def test_an_empty_opening_is_refused():
    with pytest.raises(ValueError, match=r"openings\.tool"):
        learner({"openings": {"fast": "=", "tool": ""}})


def test_what_acts_is_not_refused():
    assert complaints(learner()) == []
