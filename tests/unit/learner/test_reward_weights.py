"""Weights of rewards act on returns, evaluations and groups; what is recorded has none; a misspelt name is told."""

import json
from dataclasses import replace

import numpy as np
import pytest

from launch.supervise.progress import MetricsTail, sentence
from learner.curriculum import Curriculum
from learner.intake.evaluation import result_of
from learner.intake.intake import Intake
from learner.metrics import Report, rollout_metrics
from learner.replay.file import decode_item, encode_item
from learner.rewards import composed
from learner.settings.advantages import RewardConfig
from learner.settings.learner import LearnerConfig
from learner.trainer import Trainer
from protocol.codec import decode, encode_arrays, encode_delivery
from protocol.messages.episodes import Deliver, Reward, Segment, Turn
from tests.trajectories import make_trajectory

REWARDS = [Reward("exact", 1, 1.0), Reward("format", 1, 0.5), Reward("length", 1, -3.0)]
WEIGHTS = {"format": 2.0, "length": 0.0}


def weighted(trajectory, weights):
    (result,) = composed(RewardConfig(weights=weights), [trajectory])
    return result


def test_the_return_has_the_weights_and_the_recorded_rewards_have_not():
    t = weighted(make_trajectory("t", rewards=REWARDS), WEIGHTS)
    assert t.return_ == 2.0
    assert t.turn_rewards == {1: 2.0}
    assert t.reward_per_token()[-1] == 2.0
    assert t.reward_by_name == {"exact": 1.0, "format": 0.5, "length": -3.0}


def test_without_weights_nothing_is_copied():
    t = make_trajectory("t", rewards=REWARDS)
    assert weighted(t, {}) is t
    assert weighted(t, {"other": 2.0}) is t
    assert t.return_ == -1.5


def test_curves_by_name_are_means_without_weights_over_those_that_have_the_reward():
    one = weighted(make_trajectory("t", rewards=REWARDS), WEIGHTS)
    other = weighted(make_trajectory("u", rewards=[Reward("exact", 1, 0.0)]), WEIGHTS)
    metrics = rollout_metrics([one, other], [])
    assert metrics["rollout/return_mean"] == 1.0
    assert {name: value for name, value in metrics.items() if name.startswith("reward/")} == {
        "reward/exact": 0.5, "reward/format": 0.5, "reward/length": -3.0,
    }  # fmt: skip
    result = result_of([one, other])
    assert (result.return_mean, result.scalars()["evaluation/reward/length"]) == (1.0, -3.0)
    assert result.record(tag="t", step=0, policy_version=0)["rewards"]["exact"] == 0.5


def test_a_replayed_trajectory_keeps_both():
    t = weighted(make_trajectory("t", rewards=REWARDS), WEIGHTS)
    again = decode_item(encode_item(t))
    assert (again.return_, again.reward_by_name) == (t.return_, t.reward_by_name)
    # A table that an earlier version wrote has no such field.
    stored = encode_item(make_trajectory("t", rewards=REWARDS))
    (trajectory,) = stored.trajectories
    fields = {name: value for name, value in trajectory.fields.items() if name != "given_rewards"}
    assert decode_item(replace_fields(stored, trajectory, fields)).return_ == -1.5


def replace_fields(stored, trajectory, fields):
    import msgspec

    return msgspec.structs.replace(stored, trajectories=[msgspec.structs.replace(trajectory, fields=fields)])


def member(number, rewards, version=0):
    segment = Segment(
        trajectory_id=f"0g0.{number}.0", task_id=f"0g0.{number}", group_id="0g0", group_size=2, index=0, offset=0,
        tokens=2, action_tokens=1, status="finished", turns=[Turn(0, 0, 1, False), Turn(1, 1, 2, True)],
        rewards=rewards,
    )  # fmt: skip
    arrays = {
        "token_ids": np.array([1, 2], dtype=np.int32),
        "action_mask": np.array([0, 1], dtype=np.uint8),
        "logp_behaviour": np.array([0.0, -0.5], dtype=np.float32),
        "policy_version": np.array([-1, version], dtype=np.int32),
    }
    return tuple(encode_arrays(segment, arrays)[1:3])


@pytest.mark.parametrize(("weights", "ready"), [({}, 1), ({"length": 0.0}, 0), ({"length": 0.5}, 1)])
def test_a_group_that_differs_in_a_reward_of_weight_0_has_equal_returns(weights, ready):
    config = LearnerConfig(group_size=2, batch_trajectories=4, max_policy_lag=0, reward={"weights": weights})
    curriculum = Curriculum("rows", config)
    curriculum.refill(version=0, lockstep=False)
    intake = Intake(curriculum, True)
    members = [member(i, [Reward("exact", 1, 1.0), Reward("length", 1, float(i))]) for i in range(2)]
    message, rest = decode(encode_delivery(Deliver(unit_id="0g0", segments=2), members))
    intake.receive(message, rest)
    assert len(intake.ready) == ready
    assert intake.signal.uniform_groups == 1 - ready
    for unit in intake.ready:
        assert [t.return_ for t in unit.trajectories] == [1.0, 1.0 + weights.get("length", 1.0)]
        assert unit.trajectories[1].reward_by_name == {"exact": 1.0, "length": 1.0}


@pytest.mark.parametrize(("weight", "ready"), [(1.0, 0), (2.0, 1)])
def test_a_group_with_equal_returns_is_kept_if_the_advantage_tells_its_members_apart(weight, ready):
    """Rewards (1, 0) and (0, 1): with weights 1 and 2 the second is better, with equal weights nobody is."""
    terms = [{"value": "exact"}, {"value": "length", "weight": weight}]
    config = LearnerConfig(
        group_size=2, batch_trajectories=4, max_policy_lag=0,
        algorithm={"advantage": {"kind": "compared", "terms": terms}},
    )  # fmt: skip
    assert config.drops_uniform_groups
    curriculum = Curriculum("rows", config)
    curriculum.refill(version=0, lockstep=False)
    intake = Intake(curriculum, True)
    rewards = [[Reward("exact", 1, 1.0 - i), Reward("length", 1, float(i))] for i in range(2)]
    members = [member(i, own) for i, own in enumerate(rewards)]
    intake.receive(*decode(encode_delivery(Deliver(unit_id="0g0", segments=2), members)))
    assert (len(intake.ready), intake.signal.uniform_groups) == (ready, 1 - ready)


def test_a_name_that_does_not_occur_is_told_once_with_the_nearest(tmp_path):
    report = Report(tmp_path)
    trainer = Trainer(
        LearnerConfig(reward={"weights": {"fromat": 2.0, "exact": 1.0}}), tmp_path, None, None, None, report, step=1
    )  # fmt: skip
    arrived = [make_trajectory("t", rewards=REWARDS)]
    trainer.note_unknown_weights([replace(arrived[0], rewards=[])])
    trainer.note_unknown_weights(arrived)
    trainer.note_unknown_weights(arrived)
    report.close()
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line.pop("time") > 0
    assert line == {
        "step": 1,
        "note": "learner.reward.weights.fromat: none of the first 1 episodes has a reward of this name; did you mean "
        "'format'? (rewards: exact, format, length)",
    }
    tail = MetricsTail()
    assert [sentence(news) for news in tail.read(tmp_path / "metrics.jsonl")] == [line["note"]]
    # A learner that goes back to a checkpoint writes the file anew.
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "new").write_text(text)
    (tmp_path / "new").rename(tmp_path / "metrics.jsonl")
    assert tail.read(tmp_path / "metrics.jsonl") == []
    assert tail.values == {}
