"""Trajectories trained window by window while they are still being generated."""

import numpy as np
import pytest

from learner.config import LearnerConfig
from learner.curriculum import Curriculum
from learner.inlet import Inlet
from protocol.codec import decode, encode_arrays, encode_delivery
from protocol.messages import Deliver, Dropped, Reward, Segment, Turn

CONFIG = LearnerConfig(group_size=1, batch_trajectories=2, max_policy_lag=1, train_on="windows")
PROMPT, WINDOW = 2, 3


@pytest.fixture
def inlet():
    curriculum = Curriculum("calculator", CONFIG)
    assert len(curriculum.refill(version=0, lockstep=False)) == 2
    return Inlet(curriculum, filter_uniform=False, windows=True)


def segment(index, *, task="0g0.0", attempt=0, status="unfinished", version=0):
    """The prompt and a window of actions, or a window more."""
    start = 0 if index == 0 else PROMPT + WINDOW * index
    end = PROMPT + WINDOW * (index + 1)
    turns = [Turn(0, 0, PROMPT, False)] if index == 0 else []
    head = Segment(
        trajectory_id=f"{task}.{attempt}",
        task_id=task,
        group_id=task.partition(".")[0],
        group_size=1,
        index=index,
        offset=start,
        tokens=end - start,
        action_tokens=WINDOW,
        status=status,
        turns=[*turns, Turn(1, max(start, PROMPT), end, True)],
        rewards=[] if status == "unfinished" else [Reward("score", 1, 1.0)],
    )
    actions = np.arange(start, end) >= PROMPT
    arrays = {
        "token_ids": np.arange(start, end, dtype=np.int32),
        "action_mask": actions.astype(np.uint8),
        "logp_behaviour": np.where(actions, -0.5, 0).astype(np.float32),
        "policy_version": np.where(actions, version, -1).astype(np.int32),
    }
    return head, encode_arrays(head, arrays)[1:3]


def deliver(inlet, index, **fields):
    head, frames = segment(index, **fields)
    unit = f"{head.trajectory_id}/{index}"
    message, rest = decode(
        encode_delivery(Deliver(lease_id=f"lease-{unit}", unit_id=unit, segments=1), [tuple(frames)])
    )
    inlet.received(message, rest)


def test_each_window_is_trained_once_with_all_before_as_context(inlet):
    seen = []
    for index, status in enumerate(["unfinished", "unfinished", "finished"]):
        deliver(inlet, index, status=status)
        (group,) = inlet.take(1)
        (t,) = group.trajectories
        assert t.status == status
        assert t.token_ids.tolist() == list(range(PROMPT + WINDOW * (index + 1)))
        seen += t.token_ids[t.window_start :][t.action_mask[t.window_start :]].tolist()
        inlet.commit(1, index, [group])
        assert inlet.curriculum.owns("0g0") == (status == "unfinished")
    assert seen == list(range(PROMPT, PROMPT + 3 * WINDOW))
    assert len(inlet.open) == 0
    assert [t.status for t in inlet.take_recent()] == ["finished"]


def test_room_is_freed_by_the_last_window_only(inlet):
    deliver(inlet, 0)
    inlet.commit(1, 0, inlet.take(1))
    assert inlet.curriculum.refill(version=0, lockstep=False) == []
    deliver(inlet, 1, status="finished")
    inlet.commit(1, 1, inlet.take(1))
    assert len(inlet.curriculum.refill(version=0, lockstep=False)) == 1


def test_a_stale_window_is_not_trained_and_stays_as_context(inlet):
    deliver(inlet, 0, version=0)
    inlet.drop_stale(3)
    assert not inlet.ready
    assert inlet.counts.tokens == {"stale": WINDOW}
    deliver(inlet, 1, version=4, status="finished")
    (group,) = inlet.take(1)
    assert len(group.trajectories[0]) == PROMPT + 2 * WINDOW


def test_a_gap_breaks_the_trajectory_and_leaves_nothing_behind(inlet):
    deliver(inlet, 0)
    deliver(inlet, 2)
    deliver(inlet, 3, status="finished")
    assert inlet.counts.trajectories == {"rejected": 2}
    assert len(inlet.open) == 0
    assert not inlet.curriculum.owns("0g0")
    assert len(inlet.commit(1, 0, inlet.take(5)).dropped) == 2


def test_another_attempt_takes_the_place_of_the_first(inlet):
    deliver(inlet, 0)
    deliver(inlet, 0, attempt=1)
    deliver(inlet, 1, attempt=1, status="finished")
    assert len(inlet.open) == 0
    assert [g.trajectories[0].trajectory_id for g in inlet.take(3)] == ["0g0.0.0", "0g0.0.1", "0g0.0.1"]


def test_pieces_of_an_attempt_that_was_replaced_are_rejected(inlet):
    deliver(inlet, 0)
    deliver(inlet, 0, attempt=1)
    deliver(inlet, 1, attempt=0)
    assert inlet.counts.trajectories == {"rejected": 1}


def test_a_failed_end_frees_the_room_and_is_not_trained(inlet):
    deliver(inlet, 0)
    inlet.commit(1, 0, inlet.take(1))
    deliver(inlet, 1, status="failed")
    assert not inlet.ready
    assert not inlet.curriculum.owns("0g0")
    assert inlet.counts.trajectories["failed"] == 1


def test_a_task_that_is_given_up_frees_its_room_and_its_prefix(inlet):
    deliver(inlet, 0)
    inlet.received(Dropped(unit_id="0g0.0", group_id="0g0", trajectories=1, reason="given_up"), [])
    assert len(inlet.open) == 0
    assert not inlet.curriculum.owns("0g0")


def test_windows_of_another_epoch_are_dropped(inlet):
    deliver(inlet, 0, task="9g0.0")
    assert not inlet.ready
    assert len(inlet.open) == 0


def test_a_group_of_several_is_free_when_its_last_member_is():
    config = CONFIG.model_copy(update={"group_size": 2})
    curriculum = Curriculum("calculator", config)
    curriculum.refill(version=0, lockstep=False)
    inlet = Inlet(curriculum, filter_uniform=False, windows=True)
    deliver(inlet, 0, task="0g0.0", status="finished")
    inlet.commit(1, 0, inlet.take(1))
    assert curriculum.owns("0g0")
    assert [task.member for task in curriculum.outstanding["0g0"]] == [1]
    restored = Curriculum("calculator", config)
    assert [task.member for task in restored.restore(curriculum.state(), epoch=2)] == [1]
    deliver(inlet, 0, task="0g0.1", status="finished")
    inlet.commit(1, 1, inlet.take(1))
    assert not curriculum.owns("0g0")
