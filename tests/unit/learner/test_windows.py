"""Test trajectories that are trained window by window while they are still being generated."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.curriculum import Curriculum
from learner.errors import OpenStateError
from learner.intake.intake import Intake
from learner.settings.learner import LearnerConfig
from protocol.codec import decode, encode_arrays, encode_delivery
from protocol.messages.episodes import Deliver, Dropped, Reward, Segment, Turn

CONFIG = LearnerConfig(group_size=1, batch_trajectories=2, max_policy_lag=1, train_on="windows")
PROMPT, WINDOW = 2, 3
LONGEST = 5
ATTEMPTS = st.lists(
    st.lists(st.sampled_from([0, 1, 1, 2]), min_size=1, max_size=LONGEST), min_size=1, max_size=3
)
"""Number of times that each segment of each attempt at a task is delivered."""


@pytest.fixture
def intake():
    curriculum = Curriculum("calculator", CONFIG)
    assert len(curriculum.refill(version=0, lockstep=False)) == 4
    return Intake(curriculum, filter_uniform=False, windows=True)


def segment(index, *, task="0g0.0", attempt=0, status="unfinished", version=0, logp=-0.5, prompt_only=False):
    """Return the prompt with the first window of actions, or a later window."""
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
        action_tokens=0 if prompt_only else WINDOW,
        status=status,
        turns=[*turns, Turn(1, max(start, PROMPT), end, True)],
        rewards=[] if status == "unfinished" else [Reward("score", 1, 1.0)],
    )
    actions = np.arange(start, end) >= (end if prompt_only else PROMPT)
    arrays = {
        "token_ids": np.arange(start, end, dtype=np.int32),
        "action_mask": actions.astype(np.uint8),
        "logp_behaviour": np.where(actions, logp, 0).astype(np.float32),
        "policy_version": np.where(actions, version, -1).astype(np.int32),
    }
    return head, encode_arrays(head, arrays)[1:3]


def deliver(intake, index, **fields):
    head, frames = segment(index, **fields)
    unit = f"{head.trajectory_id}/{index}"
    message, rest = decode(
        encode_delivery(
            Deliver(unit_id=unit, segments=1, complete=head.status != "unfinished"),
            [tuple(frames)],
        )
    )
    intake.receive(message, rest)


def test_each_window_is_trained_once_with_all_before_as_context(intake):
    seen = []
    for index, status in enumerate(["unfinished", "unfinished", "finished"]):
        deliver(intake, index, status=status)
        (group,) = intake.take_batch(1)
        (t,) = group.trajectories
        assert t.status == status
        assert t.token_ids.tolist() == list(range(PROMPT + WINDOW * (index + 1)))
        seen += t.token_ids[t.window_start :][t.action_mask[t.window_start :]].tolist()
        intake.commit(1, index, [group])
        assert intake.curriculum.owns("0g0") == (status == "unfinished")
    assert seen == list(range(PROMPT, PROMPT + 3 * WINDOW))
    assert len(intake.open) == 0
    assert [t.status for t in intake.take_recent()] == ["finished"]


def test_room_is_freed_by_the_last_window_only(intake):
    deliver(intake, 0)
    intake.commit(1, 0, intake.take_batch(1))
    assert intake.curriculum.refill(version=0, lockstep=False) == []
    deliver(intake, 1, status="finished")
    intake.commit(1, 1, intake.take_batch(1))
    assert len(intake.curriculum.refill(version=0, lockstep=False)) == 1


def test_a_stale_window_is_not_trained_and_stays_as_context(intake):
    deliver(intake, 0, version=0)
    intake.drop_stale(3)
    assert not intake.ready
    assert intake.counts.tokens == {"stale": WINDOW}
    deliver(intake, 1, version=4, status="finished")
    (group,) = intake.take_batch(1)
    assert len(group.trajectories[0]) == PROMPT + 2 * WINDOW


def test_windows_that_wait_take_the_room_of_new_trajectories():
    curriculum = Curriculum("calculator", CONFIG)
    assert len(curriculum.refill(version=0, lockstep=False, backlog=3)) == 1
    assert curriculum.refill(version=0, lockstep=False, backlog=3) == []


def test_a_gap_breaks_the_trajectory_and_leaves_nothing_behind(intake):
    deliver(intake, 0)
    deliver(intake, 2)
    deliver(intake, 3, status="finished")
    assert intake.counts.trajectories == {"broken": 1}
    assert intake.counts.tokens == {"broken": 2 * WINDOW}
    assert (len(intake.open), intake.open.tokens) == (0, 0)
    assert not intake.curriculum.owns("0g0")
    assert len(intake.commit(1, 0, intake.take_batch(5)).dropped) == 2


def test_another_attempt_takes_the_place_of_the_first(intake):
    deliver(intake, 0)
    deliver(intake, 0, attempt=1)
    deliver(intake, 1, attempt=1, status="finished")
    assert len(intake.open) == 0
    assert [g.trajectories[0].trajectory_id for g in intake.take_batch(3)] == [
        "0g0.0.0",
        "0g0.0.1",
        "0g0.0.1",
    ]


def test_late_pieces_of_an_attempt_that_was_replaced_harm_the_next_one_not(intake):
    deliver(intake, 0)
    deliver(intake, 0, attempt=1)
    deliver(intake, 1, attempt=0)
    assert intake.counts.trajectories == {"broken": 1}
    assert intake.counts.tokens == {"broken": WINDOW}
    deliver(intake, 1, attempt=1, status="finished")
    assert [g.unit_id for g in intake.take_batch(5)] == ["0g0.0.0/0", "0g0.0.1/0", "0g0.0.1/1"]


def test_a_prompt_longer_than_a_segment_is_context_and_no_window(intake):
    deliver(intake, 0, prompt_only=True)
    assert not intake.ready
    assert intake.counts.tokens == {}
    assert intake.open.tokens == PROMPT + WINDOW
    # The broker delivers the unit again, because the learner's commit was lost.
    deliver(intake, 0, prompt_only=True)
    deliver(intake, 1, status="finished")
    (group,) = intake.take_batch(1)
    assert group.trajectories[0].window_start == PROMPT + WINDOW
    assert group.trajectories[0].window_tokens == WINDOW
    assert "broken" not in intake.counts.trajectories


def test_an_attempt_that_begins_anew_after_a_restart_of_the_broker_is_another_one(intake):
    deliver(intake, 0)
    intake.commit(1, 0, intake.take_batch(1))
    deliver(intake, 0, version=3)
    assert intake.counts.trajectories == {"broken": 1}
    deliver(intake, 1, version=3, status="finished")
    *_, last = intake.take_batch(2)
    assert last.trajectories[0].policy_version.tolist() == [-1] * PROMPT + [3] * 2 * WINDOW


def test_what_has_ended_here_is_not_asked_for_again(intake):
    deliver(intake, 0, task="0g0.0")
    deliver(intake, 0, task="0g1.0", status="finished")
    assert [task.task_id for task in intake.unanswered_tasks()] == ["0g0.0", "0g2.0", "0g3.0"]


def test_a_group_that_is_over_takes_its_prefixes_with_it(intake):
    deliver(intake, 0)
    intake.receive(Dropped(unit_id="0g0", group_id="0g0", trajectories=1, reason="over"), [])
    assert len(intake.open) == 0
    assert not intake.curriculum.owns("0g0")


def test_a_last_window_the_broker_dropped_frees_prefix_and_room(intake):
    deliver(intake, 0)
    intake.receive(Dropped(unit_id="0g0.0.0/1", group_id="0g0", trajectories=1, reason="stale"), [])
    assert len(intake.open) == 0
    assert not intake.curriculum.owns("0g0")


def test_a_window_the_broker_dropped_in_the_middle_breaks_what_follows(intake):
    deliver(intake, 0)
    intake.receive(Dropped(unit_id="0g0.0.0/1", group_id="0g0", trajectories=0, reason="too_large"), [])
    assert intake.curriculum.owns("0g0"), "the actor is at it still"
    deliver(intake, 2)
    assert intake.counts.trajectories["broken"] == 1
    assert len(intake.open) == 0
    deliver(intake, 3, status="finished")
    assert not intake.curriculum.owns("0g0")


def test_a_last_window_that_cannot_be_read_frees_prefix_and_room(intake):
    deliver(intake, 0)
    head = Deliver(unit_id="0g0.0.0/1", segments=1, complete=True)
    intake.receive(head, [b"no segment", b""])
    assert len(intake.open) == 0
    assert not intake.curriculum.owns("0g0")


def test_numbers_that_would_spoil_a_gradient_break_the_trajectory(intake):
    deliver(intake, 0, logp=float("nan"))
    assert intake.counts.trajectories == {"broken": 1}
    assert not intake.ready
    deliver(intake, 1, status="finished")
    assert not intake.curriculum.owns("0g0")


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_prefixes_are_bounded_and_none_is_left_whatever_is_lost(data):
    """Segments are lost or come twice, attempts are cut off; each task ends, or is given up."""
    curriculum = Curriculum("calculator", CONFIG)
    intake = Intake(curriculum, filter_uniform=False, windows=True)
    tasks = [task.task_id for task in curriculum.refill(version=0, lockstep=False)]
    script = {task: list(unroll(data.draw(ATTEMPTS))) for task in tasks}
    while any(script.values()):
        task = data.draw(st.sampled_from([task for task in tasks if script[task]]))
        attempt, index, status, times = script[task].pop(0)
        for _ in range(times):
            deliver(intake, index, task=task, attempt=attempt, status=status)
        if status != "unfinished" and not times:
            group_id = task.partition(".")[0]
            notice = Dropped(unit_id=task, group_id=group_id, trajectories=1, reason="given_up")
            intake.receive(notice, [])
        assert intake.open.tokens <= (PROMPT + WINDOW * LONGEST) * len(curriculum.outstanding)
        intake.commit(1, 0, intake.take_batch(data.draw(st.integers(0, 2))))
    intake.commit(1, 0, intake.take_batch(99))
    assert (len(intake.open), intake.open.tokens) == (0, 0)
    assert not curriculum.outstanding
    assert not intake.commits.held_units


def unroll(attempts):
    """Yield the segments in order; the last attempt ends."""
    for number, counts in enumerate(attempts):
        for index, times in enumerate(counts):
            ends = number == len(attempts) - 1 and index == len(counts) - 1
            yield number, index, "finished" if ends else "unfinished", times


def test_a_failed_end_frees_the_room_and_is_not_trained(intake):
    deliver(intake, 0)
    intake.commit(1, 0, intake.take_batch(1))
    deliver(intake, 1, status="failed")
    assert not intake.ready
    assert not intake.curriculum.owns("0g0")
    assert intake.counts.trajectories["failed"] == 1


def test_a_task_that_is_given_up_frees_its_room_and_its_prefix(intake):
    deliver(intake, 0)
    intake.receive(Dropped(unit_id="0g0.0", group_id="0g0", trajectories=1, reason="given_up"), [])
    assert len(intake.open) == 0
    assert not intake.curriculum.owns("0g0")


def test_windows_of_another_epoch_are_dropped(intake):
    deliver(intake, 0, task="9g0.0")
    assert not intake.ready
    assert len(intake.open) == 0


def test_a_group_of_several_is_free_when_its_last_member_is():
    config = CONFIG.model_copy(update={"group_size": 2})
    curriculum = Curriculum("calculator", config)
    curriculum.refill(version=0, lockstep=False)
    intake = Intake(curriculum, filter_uniform=False, windows=True)
    deliver(intake, 0, task="0g0.0", status="finished")
    intake.commit(1, 0, intake.take_batch(1))
    assert curriculum.owns("0g0")
    assert [task.member for task in curriculum.outstanding["0g0"]] == [1]
    restored = Curriculum("calculator", config, epoch=2)
    tasks = restored.restore(curriculum.state())
    assert [task.task_id for task in tasks] == ["2g0.1", "2g1.0", "2g1.1"]
    deliver(intake, 0, task="0g0.1", status="finished")
    intake.commit(1, 1, intake.take_batch(1))
    assert not curriculum.owns("0g0")


# --- restart of the learner ---------------------------------------------------------------------------------


def continued(intake):
    """Return a new process's intake from a checkpoint, while the broker holds all outstanding tasks."""
    fresh = Curriculum("calculator", CONFIG, epoch=1, lineage=0)
    fresh.restore(intake.curriculum.state())
    again = Intake(fresh, filter_uniform=False, windows=True)
    again.restore(intake.state())
    again.open.restore(intake.open.encode())
    fresh.adopt([task.task_id for tasks in fresh.outstanding.values() for task in tasks])
    return again


def test_a_trajectory_goes_on_after_a_restart_with_its_context(intake):
    deliver(intake, 0)
    intake.commit(1, 1, intake.take_batch(1))
    again = continued(intake)
    deliver(again, 1, status="finished")
    (group,) = again.take_batch(1)
    assert group.trajectories[0].token_ids.tolist() == list(range(PROMPT + 2 * WINDOW))
    assert group.trajectories[0].window_start == PROMPT + WINDOW
    again.commit(1, 2, [group])
    assert not again.curriculum.owns("0g0")
    again.check()


def test_windows_that_waited_at_the_checkpoint_are_trained_when_they_come_again(intake):
    """This holds also for a trajectory that had ended, of which other windows are trained already."""
    deliver(intake, 0)
    intake.commit(1, 1, intake.take_batch(1))
    deliver(intake, 1)
    deliver(intake, 2, status="finished")
    again = continued(intake)
    for index, status in enumerate(["unfinished", "unfinished", "finished"]):
        deliver(again, index, status=status)
    windows = [group.trajectories[0] for group in again.take_batch(5)]
    assert [(t.window_start, len(t)) for t in windows] == [(5, 8), (8, 11)]
    assert again.commits.recommit(1)[0].trained == ["0g0.0.0/0"]
    assert again.curriculum.owns("0g0"), "its last window is in training"


def test_context_that_is_committed_is_not_missing_after_a_restart(intake):
    deliver(intake, 0, prompt_only=True)
    intake.commit(1, 1, [])
    again = continued(intake)
    deliver(again, 1, status="finished")
    assert [group.trajectories[0].window_start for group in again.take_batch(1)] == [PROMPT + WINDOW]


def test_a_broken_attempt_stays_broken_after_a_restart(intake):
    deliver(intake, 0)
    deliver(intake, 2)
    again = continued(intake)
    deliver(again, 1)
    assert not again.ready
    assert again.counts.tokens["broken"] == 2 * WINDOW


def test_stored_trajectories_that_cannot_be_read_name_the_cure(intake):
    deliver(intake, 0)
    whole = intake.open.encode()
    for cut in range(len(whole)):
        with pytest.raises(OpenStateError, match="delete their file"):
            intake.open.restore(whole[:cut])
    assert len(intake.open) == 1


class World:
    """A broker that keeps units until a checkpoint covers their commit; a learner that dies at any moment."""

    def __init__(self, length):
        self.curriculum = Curriculum("calculator", CONFIG)
        self.intake = Intake(self.curriculum, filter_uniform=False, windows=True)
        self.tasks = [task.task_id for task in self.curriculum.refill(version=0, lockstep=False)][:2]
        self.length = length
        self.unborn = [(task, index) for index in range(length) for task in self.tasks]
        self.stored, self.queue, self.trained = [], [], []
        self.committed: dict[str, int] = {}
        self.step = 0
        self.checkpoint()

    def stream(self):
        if self.unborn:
            self.stored.append(self.unborn.pop(0))
            self.queue.append(self.stored[-1])

    def deliver(self):
        if self.queue:
            task, index = self.queue.pop(0)
            status = "finished" if index == self.length - 1 else "unfinished"
            deliver(self.intake, index, task=task, status=status)
            for message in self.intake.commits.recommit(1):
                self.committed |= dict.fromkeys(message.trained, message.step)

    def train(self, *, lost=False):
        if self.intake.ready:
            self.step += 1
            units = self.intake.commit(1, self.step, self.intake.take_batch(1)).trained
            self.trained += units
            self.committed |= {} if lost else dict.fromkeys(units, self.step)

    def checkpoint(self):
        self.saved = self.step, continued(self.intake), list(self.trained)

    def crash(self):
        """Start the next process, which repeats the steps since its checkpoint with redelivered units."""
        self.step, intake, trained = self.saved
        self.intake, self.trained = continued(intake), list(trained)
        self.committed = {unit: at for unit, at in self.committed.items() if at <= self.step}
        self.redeliver()

    def redeliver(self):
        """Queue all uncommitted units again, because the broker was restarted or has a new learner."""
        self.queue = [(t, i) for t, i in self.stored if f"{t}.0/{i}" not in self.committed]


ACTIONS = ["stream", "stream", "deliver", "deliver", "train", "lose", "checkpoint", "crash", "redeliver"]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.lists(st.sampled_from(ACTIONS), max_size=60))
def test_over_crashes_each_window_is_trained_once_in_the_line_that_survives(length, actions):
    world = World(length)
    whole = sorted(f"{task}.0/{index}" for task, index in world.unborn)
    for action in actions:
        if action == "lose":
            world.train(lost=True)
        else:
            getattr(world, action)()
        assert len(world.trained) == len(set(world.trained))
        world.intake.check()
    world.redeliver()
    for _ in whole:
        world.stream()
    for _ in whole:
        world.deliver()
    for _ in whole:
        world.train()
    assert sorted(world.trained) == whole
    assert sorted(world.committed) == whole
    assert not any(task in world.intake.open._attempts for task in world.tasks)
