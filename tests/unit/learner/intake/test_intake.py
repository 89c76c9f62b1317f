"""Test how deliveries become groups, commits and counts."""

import json
from dataclasses import replace

import numpy as np
import pytest

from learner.comparisons import has_signal
from learner.curriculum import Curriculum
from learner.errors import LedgerViolation
from learner.intake.intake import CommitMemory, Intake
from learner.settings.advantages import ComparedAdvantage, GroupAdvantage
from learner.settings.learner import EvaluationConfig, LearnerConfig
from protocol.codec import decode, encode_arrays, encode_delivery
from protocol.messages.episodes import Deliver, Dropped, Reward, Segment, Turn
from protocol.messages.peers import QueueStats
from tests.trajectories import make_trajectory

CONFIG = LearnerConfig(group_size=2, batch_trajectories=4, max_policy_lag=0)


def member(
    group,
    number,
    reward,
    *,
    status="finished",
    purpose="train",
    logp=-0.5,
    correct=None,
    temperature=1.0,
    version=0,
):
    segment = Segment(
        trajectory_id=f"{group}.{number}.0",
        task_id=f"{group}.{number}",
        group_id=group,
        group_size=2,
        index=0,
        offset=0,
        tokens=3,
        action_tokens=2,
        status=status,
        purpose=purpose,
        turns=[Turn(0, 0, 1, False), Turn(1, 1, 3, True)],
        rewards=[Reward("score", 1, reward)],
        temperature=temperature,
        extra={"correct": correct},
    )
    arrays = {
        "token_ids": np.array([1, 2, 3], dtype=np.int32),
        "action_mask": np.array([0, 1, 1], dtype=np.uint8),
        "logp_behaviour": np.array([0.0, logp, logp], dtype=np.float32),
        "policy_version": np.array([-1, version, version], dtype=np.int32),
    }
    frames = encode_arrays(segment, arrays)
    return frames[1], frames[2]


def deliver(intake, unit, *members):
    frames = encode_delivery(Deliver(unit_id=unit, segments=len(members)), list(members))
    message, rest = decode(frames)
    intake.receive(message, rest)


def intake_with_tasks(*, filter_uniform=True, **settings):
    curriculum = Curriculum("calculator", LearnerConfig.model_validate(CONFIG.model_dump() | settings))
    curriculum.refill(version=0, lockstep=False)
    return Intake(curriculum, filter_uniform)


def test_a_group_with_different_returns_is_ready_and_committed_as_trained():
    intake = intake_with_tasks()
    deliver(intake, "0g0", member("0g0", 0, 1.0), member("0g0", 1, 0.0))
    assert len(intake.ready) == 1
    batch = intake.take_batch(1)
    commit = intake.commit(epoch=1, step=3, trained=batch)
    assert (commit.trained, commit.dropped, commit.step) == (["0g0"], [], 3)
    assert not intake.curriculum.owns("0g0")
    assert intake.commit(epoch=1, step=3, trained=[]) is None


def test_versions_of_undone_steps_are_counted_from_where_the_line_left_them():
    intake = intake_with_tasks()
    intake.line.fork(0, 3)
    deliver(intake, "0g0", member("0g0", 0, 1.0), member("0g0", 1, 0.0, version=2))
    lags = [3 - t.policy_version[t.action_mask] for group in intake.ready for t in group.trajectories]
    assert [lag.tolist() for lag in lags] == [[0, 0], [2, 2]]
    # The weights that are trained now continue version 0.
    intake.drop_stale(2)
    assert len(intake.ready) == 1
    again = intake_with_tasks()
    again.restore(json.loads(json.dumps(intake.state())))
    assert again.line.forks == ((0, 3),)


def test_equal_returns_are_dropped_and_make_room():
    intake = intake_with_tasks()
    deliver(intake, "0g0", member("0g0", 0, 1.0), member("0g0", 1, 1.0))
    assert not intake.ready
    assert intake.counts.trajectories == {"uniform": 2}
    assert intake.counts.tokens == {"uniform": 4}
    assert intake.commit(1, 0, []).dropped == ["0g0"]
    assert len(intake.curriculum.refill(version=0, lockstep=False)) == 2


def test_a_broken_member_is_rejected_and_the_others_stay():
    intake = intake_with_tasks()
    deliver(intake, "0g0", member("0g0", 0, 1.0), member("0g0", 1, float("nan")))
    assert intake.counts.trajectories["rejected"] == 1
    deliver(intake, "0g1", member("0g1", 0, 1.0), member("0g1", 1, 0.0, logp=float("inf")))
    assert intake.counts.trajectories["rejected"] == 2
    assert not intake.ready, "one member left has nothing to be compared with"


def test_a_failed_member_is_counted_and_not_trained():
    intake = intake_with_tasks()
    deliver(intake, "0g0", member("0g0", 0, 1.0), member("0g0", 1, 0.0, status="failed"))
    assert intake.counts.trajectories["failed"] == 1
    assert not intake.ready


def test_evaluation_goes_aside():
    intake = intake_with_tasks()
    deliver(intake, "0eval-before-0", member("0eval-before-0", 0, 1.0, purpose="eval", correct=True))
    assert intake.evaluated["0eval-before-0"].correct is True
    assert not intake.ready
    assert intake.recent == []


def test_work_of_another_epoch_is_dropped():
    intake = intake_with_tasks()
    deliver(intake, "9g0", member("9g0", 0, 1.0), member("9g0", 1, 0.0))
    assert intake.counts.trajectories == {"other_epoch": 2}
    assert not intake.ready


def test_the_broker_s_drops_and_gauges():
    intake = intake_with_tasks()
    intake.receive(Dropped(unit_id="0g1", group_id="0g1", trajectories=2, reason="stale"), [])
    assert intake.counts.trajectories == {"dropped_stale": 2}
    assert not intake.curriculum.owns("0g1")
    intake.receive(QueueStats(gauges={"broker/units_ready": 4.0}), [])
    assert intake.gauges == {"broker/units_ready": 4.0}


def test_take_is_oldest_first_and_whole_groups():
    intake = intake_with_tasks()
    for group in ("0g0", "0g1"):
        deliver(intake, group, member(group, 0, 1.0), member(group, 1, 0.0))
    assert [g.group_id for g in intake.take_batch(1)] == ["0g0"]
    assert [g.group_id for g in intake.take_batch(5)] == ["0g1"]


def test_a_unit_we_hold_is_not_trained_twice():
    intake = intake_with_tasks()
    members = [member("0g0", 0, 1.0), member("0g0", 1, 0.0)]
    deliver(intake, "0g0", *members)
    again = encode_delivery(Deliver(unit_id="0g0", segments=2, redelivered=True), members)
    intake.receive(*decode(again))
    assert len(intake.ready) == 1
    batch = intake.take_batch(1)
    intake.receive(*decode(again))
    assert not intake.ready, "it is being trained"
    assert intake.commit(1, 1, batch).trained == ["0g0"]
    intake.receive(*decode(again))
    assert not intake.ready, "it has been trained"


def test_an_evaluation_task_that_was_given_up_is_not_waited_for():
    intake = intake_with_tasks()
    name = intake.curriculum.evaluation("before", 0, EvaluationConfig())[0].group_id
    intake.receive(Dropped(unit_id=name, group_id=name, trajectories=1, reason="given_up"), [])
    assert intake.evaluated == {name: None}


def test_groups_that_went_stale_while_they_waited_are_let_go():
    intake = intake_with_tasks()
    deliver(intake, "0g0", member("0g0", 0, 1.0), member("0g0", 1, 0.0))
    intake.drop_stale(0)
    assert len(intake.ready) == 1
    intake.drop_stale(1)
    assert not intake.ready
    assert intake.counts.trajectories == {"stale": 2}
    assert intake.commit(1, 0, []).dropped == ["0g0"]


def test_an_evaluation_that_cannot_be_read_is_not_waited_for():
    intake = intake_with_tasks()
    name = intake.curriculum.evaluation("before", 0, EvaluationConfig())[0].group_id
    deliver(intake, f"{name}.0", member(name, 0, float("nan"), purpose="eval"))
    assert intake.evaluated == {name: None}


def test_a_group_that_is_here_or_being_trained_is_not_asked_for_again():
    intake = intake_with_tasks()
    deliver(intake, "0g0", member("0g0", 0, 1.0), member("0g0", 1, 0.0))
    batch = intake.take_batch(1)
    assert {task.group_id for task in intake.unanswered_tasks()} == {"0g1"}
    intake.commit(1, 1, batch)
    assert {task.group_id for task in intake.unanswered_tasks()} == {"0g1"}


def test_in_order_means_as_dealt_out_not_as_arrived():
    intake = intake_with_tasks(batch_trajectories=24)
    for group in ("0g10", "0g2", "0g9"):
        deliver(intake, group, member(group, 0, 1.0), member(group, 1, 0.0))
    assert [g.group_id for g in intake.take_batch(3, in_order=True)] == ["0g2", "0g9", "0g10"]


# --- members trained alone ----------------------------------------------------------------------------------


def test_trajectories_are_trained_one_by_one_and_free_their_own_room():
    intake = intake_with_tasks(filter_uniform=False, train_on="trajectories")
    deliver(intake, "0g0.1.0", member("0g0", 1, 1.0))
    deliver(intake, "0g0.0.0", member("0g0", 0, 0.0, status="failed"))
    assert [g.unit_id for g in intake.ready] == ["0g0.1.0"]
    assert [task.task_id for task in intake.curriculum.refill(version=0, lockstep=False)] == ["0g2.0"]
    assert [task.task_id for task in intake.unanswered_tasks()] == ["0g1.0", "0g1.1", "0g2.0"]
    assert intake.commit(1, 1, intake.take_batch(1)).trained == ["0g0.1.0"]
    assert not intake.curriculum.owns("0g0")


def test_a_trajectory_the_broker_dropped_frees_its_own_room_only():
    intake = intake_with_tasks(filter_uniform=False, train_on="trajectories")
    intake.receive(Dropped(unit_id="0g0.1.2", group_id="0g0", trajectories=1, reason="stale"), [])
    intake.receive(Dropped(unit_id="0g1.0", group_id="0g1", trajectories=1, reason="given_up"), [])
    assert [task.task_id for task in intake.unanswered_tasks()] == ["0g0.0", "0g1.1"]


def test_a_trajectory_that_cannot_be_read_frees_its_room():
    intake = intake_with_tasks(filter_uniform=False, train_on="trajectories")
    intake.receive(Deliver(unit_id="0g0.1.0", segments=1), [b"no segment", b""])
    deliver(intake, "0g1.0.0", member("0g1", 0, float("nan")))
    assert [task.task_id for task in intake.unanswered_tasks()] == ["0g0.0", "0g1.1"]


# --- a greedy member as baseline ----------------------------------------------------------------------------


def with_baseline():
    return intake_with_tasks(filter_uniform=False, algorithm={"advantage": {"kind": "greedy"}})


def test_a_group_needs_its_greedy_member():
    intake = with_baseline()
    deliver(
        intake, "0g0", member("0g0", 0, 1.0), member("0g0", 1, 0.0), member("0g0", 2, 0.0, temperature=0.0)
    )
    deliver(
        intake,
        "0g1",
        member("0g1", 0, 1.0),
        member("0g1", 1, 0.0),
        member("0g1", 2, 0.0, temperature=0.0, status="failed"),
    )
    assert [g.group_id for g in intake.ready] == ["0g0"]
    assert intake.counts.trajectories == {"failed": 1, "unusable": 2}
    assert not intake.curriculum.owns("0g1")


def test_a_greedy_member_alone_trains_nothing():
    intake = with_baseline()
    deliver(
        intake,
        "0g0",
        member("0g0", 0, 1.0, status="failed"),
        member("0g0", 1, 0.0, status="failed"),
        member("0g0", 2, 0.0, temperature=0.0),
    )
    assert not intake.ready


def test_a_lane_alone_trains_nothing_and_its_returns_are_compared_with_nobody_s():
    lane = {"lane": {"members": 1}, "algorithm": {"surrogate": {"kind": "clip"}}}
    intake = intake_with_tasks(**lane)
    failed = [member("0g0", i, 0.0, status="failed") for i in range(2)]
    deliver(intake, "0g0", *failed, member("0g0", 2, 1.0, temperature=1.2))
    equal = [member("0g1", i, 0.0) for i in range(2)]
    deliver(intake, "0g1", *equal, member("0g1", 2, 0.0, temperature=1.2))
    assert not intake.ready
    assert intake.counts.trajectories == {"failed": 2, "unusable": 1, "uniform": 3}
    again = intake_with_tasks(**lane)
    deliver(again, "0g0", *(member("0g0", i, 0.0) for i in range(2)), member("0g0", 2, 1.0, temperature=1.2))
    assert [[t.lane for t in unit.trajectories] for unit in again.ready] == [[False, False, True]]


def test_a_greedy_member_does_not_make_a_signal():
    equal = [make_trajectory(str(i), reward=1.0) for i in range(2)]
    assert not has_signal(GroupAdvantage(), [*equal, make_trajectory("b", reward=0.0, temperature=0.0)])
    assert has_signal(GroupAdvantage(), [*equal, make_trajectory("c", reward=0.0)])


def test_two_groups_of_a_family_are_not_compared_with_each_other():
    answers = [make_trajectory(f"0g0.{i}.0", group="0g0") for i in range(2)]
    judged = [make_trajectory(f"0g0r1.{i}.0", group="0g0r1", reward=1.0) for i in range(2)]
    third = make_trajectory("0g0r1.2.0", group="0g0r1", reward=0.5)
    compared = ComparedAdvantage(terms=[{"among": ["group"]}])
    for config in (GroupAdvantage(), compared):
        assert not has_signal(config, [*answers, *judged])
        assert has_signal(config, [*answers, *judged, third])
        own = [replace(t, advantage=value) for t, value in zip(judged, (0.0, 1.0), strict=True)]
        assert has_signal(config, [*answers, *own])
        assert not has_signal(config, [*answers, own[0]])
        assert not has_signal(config, own[:1])


def test_a_failed_group_that_can_be_rescued_is_kept():
    intake = intake_with_tasks()
    intake.rescuable = lambda trajectories: trajectories[0].group_id == "0g1"
    deliver(intake, "0g0", member("0g0", 0, 0.0), member("0g0", 1, 0.0))
    deliver(intake, "0g1", member("0g1", 0, 0.0), member("0g1", 1, 0.0))
    assert [group.group_id for group in intake.ready] == ["0g1"]


# --- redelivery ---------------------------------------------------------------------------------------------


def continued(intake):
    """Return the intake of a process that continues from a checkpoint; tests choose what the broker holds."""
    fresh = Curriculum("calculator", intake.curriculum.config, epoch=1, lineage=0)
    fresh.restore(intake.curriculum.state())
    again = Intake(fresh, intake.filter_uniform, intake.windows)
    again.restore(json.loads(json.dumps(intake.state())))
    again.open.restore(intake.open.encode())
    return again


def test_a_unit_that_comes_again_after_its_commit_is_committed_again_and_not_trained():
    intake = intake_with_tasks()
    members = [member("0g0", 0, 1.0), member("0g0", 1, 0.0)]
    deliver(intake, "0g0", *members)
    deliver(intake, "0g1", member("0g1", 0, 1.0), member("0g1", 1, 1.0))
    intake.commit(1, 3, intake.take_batch(1))
    for unit in ("0g0", "0g1", "0g0"):
        deliver(intake, unit, *members)
    assert not intake.ready
    (again,) = intake.commits.recommit(1)
    assert (again.step, again.trained, again.dropped) == (3, ["0g0"], ["0g1"])
    assert intake.commits.recommit(1) == []
    assert intake.counts.trajectories == {"uniform": 2, "recommitted": 6}
    assert intake.counts.arrived_tokens == 4
    intake.check()


def test_units_committed_at_several_steps_are_committed_again_at_those():
    intake = intake_with_tasks(filter_uniform=False)
    for step in (1, 2):
        deliver(intake, f"0g{step - 1}", member(f"0g{step - 1}", 0, 1.0), member(f"0g{step - 1}", 1, 0.0))
        intake.commit(1, step, intake.take_batch(1))
    for unit in ("0g1", "0g0"):
        deliver(intake, unit, member(unit, 0, 1.0), member(unit, 1, 0.0))
    assert [(m.step, m.trained) for m in intake.commits.recommit(1)] == [(1, ["0g0"]), (2, ["0g1"])]


def test_a_checkpoint_knows_what_is_committed_and_what_is_done_is_not_adopted():
    """The commit before the checkpoint was lost with the broker, so the broker still holds the unit."""
    intake = intake_with_tasks()
    members = [member("0g0", 0, 1.0), member("0g0", 1, 0.0)]
    deliver(intake, "0g0", *members)
    intake.commit(1, 3, intake.take_batch(1))
    again = continued(intake)
    held = ["0g0.0", "0g0.1", "0g1.0", "0g1.1"]
    assert again.commits.repeat_commits_of(["0g0", "0g7"]) == 1
    assert [(m.step, m.trained) for m in again.commits.recommit(1)] == [(3, ["0g0"])]
    again.curriculum.adopt(held)
    assert list(again.curriculum.outstanding) == ["0g1"]
    deliver(again, "0g0", *members)
    assert not again.ready
    assert again.commits.recommit(1)[0].trained == ["0g0"]
    again.check()


def test_a_failed_member_of_a_unit_that_comes_again_is_counted_once():
    intake = intake_with_tasks(group_size=3)
    members = [member("0g0", 0, 1.0), member("0g0", 1, 0.0), member("0g0", 2, 0.0, status="failed")]
    deliver(intake, "0g0", *members)
    assert intake.counts.trajectories == {"failed": 1}
    again = continued(intake)
    assert again.counts.total("failed") == 0
    deliver(again, "0g0", *members)
    again.check()
    assert again.counts.trajectories == {"failed": 1}
    again.commit(1, 1, again.take_batch(1))
    assert continued(again).counts.trajectories == {"failed": 1}


def test_what_was_dropped_and_released_behind_the_checkpoint_is_counted_once():
    """A unit that is dropped in the step of the checkpoint is released at once, and the next process knows nothing."""
    intake = continued(intake_with_tasks())
    intake.remembers_notices = True
    first = intake.curriculum.next_index
    last = [f"0g{first + 3}.{m}" for m in range(2)]
    early, late = f"0g{first}", f"0g{first + 1}"
    intake.receive(Dropped(unit_id=early, group_id=early, trajectories=2, reason="stale"), [])
    intake.curriculum.adopt(last)
    intake.note_over_unseen()
    assert intake.counts.trajectories == {"dropped_stale": 2, "dropped_over": 4}
    # The notice of a unit that is counted already.
    intake.receive(Dropped(unit_id=late, group_id=late, trajectories=2, reason="stale"), [])
    # And of one that is under way.
    last_group = f"0g{first + 3}"
    intake.receive(Dropped(unit_id=last_group, group_id=last_group, trajectories=2, reason="deadline"), [])
    assert intake.counts.trajectories == {"dropped_stale": 2, "dropped_over": 4, "dropped_deadline": 2}


def test_what_was_ready_at_the_checkpoint_is_trained_when_it_comes_again():
    intake = intake_with_tasks()
    members = [member("0g0", 0, 1.0), member("0g0", 1, 0.0)]
    deliver(intake, "0g0", *members)
    again = continued(intake)
    again.check()
    deliver(again, "0g0", *members)
    assert [group.unit_id for group in again.take_batch(1)] == ["0g0"]


def test_an_evaluation_that_comes_again_is_not_kept_for_ever():
    intake = intake_with_tasks()
    name = intake.curriculum.evaluation("before", 0, EvaluationConfig())[0].group_id
    deliver(intake, name, member(name, 0, 1.0, purpose="eval"))
    intake.commit(1, 0, [])
    del intake.evaluated[name]
    deliver(intake, name, member(name, 0, 1.0, purpose="eval"))
    assert intake.evaluated == {}
    assert intake.commits.recommit(1)[0].dropped == [name]


def test_of_a_trajectory_that_comes_again_the_broker_is_told_and_others_are_awaited_still():
    intake = intake_with_tasks(filter_uniform=False, train_on="trajectories")
    deliver(intake, "0g0.1.0", member("0g0", 1, 1.0))
    intake.commit(1, 1, intake.take_batch(1))
    again = continued(intake)
    assert again.commits.repeat_commits_of(["0g0.0.0", "0g0.1.0"]) == 1
    assert [m.trained for m in again.commits.recommit(1)] == [["0g0.1.0"]]
    again.curriculum.adopt(["0g0.0", "0g0.1"])
    assert not again.curriculum.awaits("0g0", "0g0.1")
    assert again.curriculum.awaits("0g0", "0g0.0")


def test_what_is_here_under_the_name_of_a_committed_unit_is_another():
    """A broker without memory had the unit made again: it is trained, and not committed for the old step."""
    intake = intake_with_tasks(filter_uniform=False)
    deliver(intake, "0g0", member("0g0", 0, 1.0), member("0g0", 1, 0.0))
    intake.commits.committed.add("0g0", step=1, trained=True)
    assert intake.commits.repeat_commits_of(["0g0"]) == 0
    intake.drop_units(list(intake.ready), "stale")
    assert intake.commits.repeat_commits_of(["0g0"]) == 0
    assert intake.commit(1, 2, []).dropped == ["0g0"]
    assert intake.commits.repeat_commits_of(["0g0"]) == 1


def test_only_the_last_units_are_remembered_and_in_order():
    committed = CommitMemory(size=3)
    for i in range(5):
        committed.add(f"0g{i}", step=i, trained=i % 2 == 0)
    committed.add("0g2", step=9, trained=True)
    assert [row[0] for row in committed.state()] == ["0g3", "0g4", "0g2"]
    again = CommitMemory(size=3)
    again.restore(json.loads(json.dumps(committed.state())))
    assert again.state() == committed.state()
    assert (again["0g3"].trained, again["0g2"].step) == (False, 9)
    smaller = CommitMemory(size=2)
    smaller.restore(committed.state())
    assert list(smaller) == list(committed)[-2:], "a checkpoint of a larger memory is cut to size"


# --- the ledger ---------------------------------------------------------------------------------------------


def test_every_token_that_came_is_in_one_place_whatever_became_of_it():
    intake = intake_with_tasks(batch_trajectories=20)
    deliver(intake, "0g0", member("0g0", 0, 1.0), member("0g0", 1, 0.0))
    deliver(intake, "0g1", member("0g1", 0, 1.0), member("0g1", 1, 1.0))
    deliver(intake, "0g2", member("0g2", 0, 1.0), member("0g2", 1, float("nan")))
    deliver(intake, "0g3", member("0g3", 0, 1.0), member("0g3", 1, 0.0, status="failed"))
    deliver(intake, "0g4", member("0g4", 0, 1.0, logp=3.0), member("0g4", 1, float("nan")))
    deliver(intake, "9g5", member("9g5", 0, 1.0), member("9g5", 1, 0.0))
    deliver(intake, "0eval-x-0", member("0eval-x-0", 0, 1.0, purpose="eval"))
    intake.receive(Deliver(unit_id="0g6", segments=1), [b"no segment", b""])
    deliver(intake, "0g7", member("0g7", 0, 1.0), member("0g7", 1, 0.0))
    intake.check()
    intake.commit(1, 1, intake.take_batch(1))
    intake.check()
    intake.drop_stale(1)
    intake.check()
    assert intake.delivered_tokens == 2 * 15
    assert intake.trained_tokens == 4


def test_the_ledger_finds_a_token_that_is_lost_or_counted_twice():
    intake = intake_with_tasks()
    deliver(intake, "0g0", member("0g0", 0, 1.0), member("0g0", 1, 0.0))
    batch = intake.take_batch(1)
    with pytest.raises(LedgerViolation, match=r"of 4 .* 0 are accounted for \(difference 4\)"):
        intake.check()
    intake.commit(1, 1, batch)
    intake.counts.note("stale", 1, 2)
    with pytest.raises(LedgerViolation, match=r"of 4 .* 6 are accounted for \(difference -2\)"):
        intake.check()


def test_tokens_sampled_are_counted_over_restarts_of_learner_and_generators():
    intake = intake_with_tasks()
    for total in (10.0, 30.0):
        intake.receive(QueueStats(gauges={"generator/tokens_total": total}), [])
    again = continued(intake)
    # The generators continued, and were then restarted.
    for total in (35.0, 3.0, 8.0):
        again.receive(QueueStats(gauges={"generator/tokens_total": total}), [])
    assert again.sampled_tokens == 40


def test_tokens_sampled_are_not_counted_twice_after_a_restart_of_the_broker():
    intake = intake_with_tasks()
    intake.receive(QueueStats(gauges={"generator/tokens_total": 30.0}), [])
    # The new broker has no generator yet.
    intake.receive(QueueStats(gauges={"broker/units_ready": 0.0}), [])
    intake.receive(QueueStats(gauges={"generator/tokens_total": 35.0}), [])
    assert intake.sampled_tokens == 35


def test_episodes_and_groups_are_counted_with_why_they_failed():
    intake = intake_with_tasks()
    deliver(intake, "0g0", member("0g0", 0, 1.0), member("0g0", 1, 1.0))
    deliver(intake, "0g1", member("0g1", 0, 1.0, status="failed"), member("0g1", 1, 1.0, status="failed"))
    assert (intake.signal.episodes, intake.signal.failures.total) == (4, 2)
    assert (intake.signal.groups, intake.signal.uniform_groups) == (1, 1)
    assert intake.signal.failed.length == 2
    again = intake_with_tasks()
    again.restore(json.loads(json.dumps(intake.state())))
    assert again.signal.state() == intake.signal.state()
    old = {name: value for name, value in intake.state().items() if name != "signal"}
    for trained_tokens in (0, 5):
        again = intake_with_tasks()
        again.restore(old | {"trained_tokens": trained_tokens})
        # What an earlier version trained was neither failed nor without a signal.
        assert again.signal.failed.ever_broken == again.signal.uniform.ever_broken == (trained_tokens > 0)


def test_a_task_counts_once_though_its_group_comes_again_behind_a_checkpoint():
    selection = {"kind": "near", "tasks": 8}
    intake = intake_with_tasks(selection=selection)
    curriculum, (one, other) = intake.curriculum, list(intake.curriculum.outstanding)[:2]
    deliver(intake, one, member(one, 0, 1.0, correct=True), member(one, 1, 0.0, correct=False))
    deliver(intake, other, member(other, 0, 1.0, correct=True), member(other, 1, 1.0, correct=True))
    # The second group is dropped at once; the first one waits for its batch.
    assert curriculum.stats.attempts.sum() == 2
    assert curriculum.stats.right.sum() == 2
    again = Curriculum("calculator", curriculum.config, lineage=0)
    again.restore(curriculum.state())
    resumed = Intake(again, True)
    resumed.restore(intake.state())
    deliver(resumed, one, member(one, 0, 1.0, correct=True), member(one, 1, 0.0, correct=False))
    resumed.commit(epoch=1, step=1, trained=resumed.take_batch(1))
    assert again.stats.attempts.sum() == 4
    assert again.stats.right.sum() == 3
