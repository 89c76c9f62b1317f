"""Segments become a trajectory, or an error that names trajectory and cause."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from learner.errors import BrokenTrajectory
from learner.intake.trajectories import assemble
from protocol.messages.episodes import Reward, Segment, Turn
from tests.trajectories import make_trajectory


def make_segments():
    """Return segments: prompt of 2, action turn of 3 cut after 1, observation of 1, action turn of 2."""
    first = Segment(
        trajectory_id="t.0", task_id="t", group_id="g", group_size=4, index=0, offset=0, tokens=3,
        action_tokens=1, status="unfinished", env="calculator", temperature=0.9,
        turns=[Turn(0, 0, 2, False), Turn(1, 2, 3, True)],
    )  # fmt: skip
    second = msgspec.structs.replace(
        first, index=1, offset=3, tokens=2, action_tokens=2, turns=[Turn(1, 3, 5, True)],
        rewards=[Reward("step", 1, 0.25)],
    )  # fmt: skip
    third = msgspec.structs.replace(
        first, index=2, offset=5, tokens=3, action_tokens=2,
        turns=[Turn(2, 5, 6, False), Turn(3, 6, 8, True)],
        rewards=[Reward("step", 3, 0.5), Reward("final", 3, 1.0)], status="finished", kv="kept",
        extra={"correct": True},
    )  # fmt: skip
    return [
        (first, arrays([0, 0, 1], [4])),
        (second, arrays([1, 1], [4, 5])),
        (third, arrays([0, 1, 1], [5, 5])),
    ]


def arrays(mask, versions):
    mask = np.array(mask, dtype=np.uint8)
    version = np.full(len(mask), -1, dtype=np.int32)
    version[mask > 0] = versions
    return {
        "token_ids": np.arange(len(mask), dtype=np.int32) + 10,
        "action_mask": mask,
        "logp_behaviour": np.where(mask, -0.5, 0).astype(np.float32),
        "policy_version": version,
        "entropy": np.zeros(len(mask), dtype=np.float32),
    }


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_segments_are_joined_in_their_order(order):
    segments = make_segments()
    t = assemble([segments[i] for i in order])
    assert t.token_ids.tolist() == [10, 11, 12, 10, 11, 10, 11, 12]
    assert t.action_mask.tolist() == [False, False, True, True, True, False, True, True]
    assert t.policy_version.tolist() == [-1, -1, 4, 4, 5, -1, 5, 5]
    assert t.turns == [Turn(0, 0, 2, False), Turn(1, 2, 5, True), Turn(2, 5, 6, False), Turn(3, 6, 8, True)]
    assert (t.status, t.temperature, t.kv, t.correct) == ("finished", 0.9, "kept", True)
    assert (t.return_, t.turn_rewards) == (1.75, {1: 0.25, 3: 1.5})
    assert (len(t), t.prompt_tokens, t.action_tokens, t.action_turns) == (8, 2, 5, 2)


def test_unfinished_prefix_is_a_trajectory_too():
    t = assemble(make_segments()[:2])
    assert t.status == "unfinished"
    assert t.correct is None
    assert len(t) == 5


def test_nothing_is_not_a_trajectory():
    with pytest.raises(BrokenTrajectory, match="no segments"):
        assemble([])


@pytest.mark.parametrize(
    ("keep", "cause"),
    [([0, 2], "segment 2 follows a gap"), ([1, 2], "segment 1 follows a gap"), ([0, 0, 1], "appears twice")],
)
def test_missing_and_doubled_segments(keep, cause):
    segments = make_segments()
    with pytest.raises(BrokenTrajectory, match=rf"trajectory t\.0: .*{cause}"):
        assemble([segments[i] for i in keep])


@pytest.mark.parametrize(
    ("which", "changes", "cause"),
    [
        (1, {"offset": 4}, "starts at token 4, expected 3"),
        (1, {"trajectory_id": "u.0"}, "mixed with segments of"),
        (0, {"status": "finished"}, "is finished, but others follow"),
        (1, {"temperature": 0.5}, "temperature 0.5 in segment 1, 0.9 before"),
        (1, {"tokens": 1}, "2 elements in 'token_ids', header says 1"),
        (2, {"rewards": [Reward("final", 3, float("nan"))]}, "reward 'final' of turn 3 is nan"),
    ],
)
def test_headers_that_contradict(which, changes, cause):
    segments = make_segments()
    segment, body = segments[which]
    segments[which] = (msgspec.structs.replace(segment, **changes), body)
    if "tokens" in changes:
        segments = segments[: which + 1]
    with pytest.raises(BrokenTrajectory, match=cause):
        assemble(segments)


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("logp_behaviour", np.nan, "logp_behaviour is nan at token 4"),
        ("logp_behaviour", -np.inf, "logp_behaviour is -inf at token 4"),
        ("logp_behaviour", 0.7, "at most 0"),
        ("policy_version", -1, "action token 4 has no policy version"),
        ("token_ids", -3, "token id -3 is negative"),
    ],
)
def test_numbers_that_would_spoil_a_gradient(name, value, cause):
    segments = make_segments()
    segments[1][1][name][1] = value
    with pytest.raises(BrokenTrajectory, match=cause):
        assemble(segments)


def test_an_array_that_is_missing_is_named():
    segments = make_segments()
    del segments[0][1]["policy_version"]
    with pytest.raises(BrokenTrajectory, match="array 'policy_version' is missing"):
        assemble(segments)


def test_first_token_cannot_be_an_action():
    segment, body = make_segments()[0]
    body["action_mask"][:] = 1
    body["policy_version"][:] = 0
    with pytest.raises(BrokenTrajectory, match="prompt"):
        assemble([(segment, body)])


def test_rewards_stand_on_the_last_action_token_of_their_turn():
    """Turn 1 is tokens 2 and 3, turn 3 is tokens 5 and 6; turns 2 and 9 have no action token.

    Their rewards belong to the action before them, as in the returns by turn.
    """
    turns = [Turn(0, 0, 2, False), Turn(1, 2, 4, True), Turn(2, 4, 5, False), Turn(3, 5, 7, True)]
    rewards = [Reward("a", 1, 0.5), Reward("b", 3, 1.0), Reward("c", 2, 0.25), Reward("d", 9, 2.0)]
    t = replace(make_trajectory("t", prompt=2, actions=5, observation=(4, 5)), turns=turns, rewards=rewards)
    assert t.action_turn_index().tolist() == [0, 0, 1, 1, 2, 3, 3]
    assert t.reward_per_token().tolist() == [0, 0, 0, 0.75, 0, 0, 3.0]
    assert replace(t, window_start=3).window_tokens == 3


def test_a_greedy_training_trajectory_is_a_baseline():
    t = make_trajectory("t", temperature=0.0)
    assert t.baseline
    assert not replace(t, purpose="eval").baseline


def test_a_header_that_counts_wrongly_is_not_believed():
    segment, body = make_segments()[0]
    wrong = msgspec.structs.replace(segment, action_tokens=segment.action_tokens + 1, status="finished")
    with pytest.raises(BrokenTrajectory, match="action tokens, its header says"):
        assemble([(wrong, body)])
