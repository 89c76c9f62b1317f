"""The tasks under way never exceed the capacity that the lag bound allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.curriculum import Curriculum
from learner.settings.learner import EvaluationConfig, LearnerConfig

GREEDY = EvaluationConfig(tasks=3, temperature=0.0)


def curriculum(epoch=5, lineage=-1, **settings):
    values = {
        "group_size": 4,
        "batch_trajectories": 8,
        "max_policy_lag": 2,
        "evaluation_tasks": 3,
        **settings,
    }
    return Curriculum("calculator", LearnerConfig(**values), epoch=epoch, lineage=lineage)


def test_lockstep_asks_for_one_batch_and_for_the_weights_it_is_meant_for():
    c = curriculum()
    tasks = c.refill(version=7, lockstep=True)
    assert len(tasks) == 8
    assert {t.min_policy_version for t in tasks} == {7}
    assert c.refill(version=7, lockstep=True) == []


def test_a_settled_group_makes_room_for_one():
    c = curriculum()
    first = c.refill(version=0, lockstep=False)
    assert len(first) == 24
    c.free(first[0].group_id)
    again = c.refill(version=0, lockstep=False)
    assert len({t.group_id for t in again}) == 1
    assert {t.data["index"] for t in again} == {6}


def test_members_of_a_group_share_the_task():
    group = curriculum().refill(version=0, lockstep=True)[:4]
    assert len({t.group_id for t in group}) == 1
    assert len({t.data["index"] for t in group}) == 1
    assert [t.member for t in group] == [0, 1, 2, 3]


def test_evaluation_is_greedy_on_held_out_tasks_and_waits_for_its_version():
    tasks = curriculum().evaluation("after", 9, GREEDY)
    assert [t.data for t in tasks] == [{"index": i, "split": "heldout"} for i in range(3)]
    assert {(t.sampling.temperature, t.purpose, t.min_policy_version) for t in tasks} == {(0.0, "eval", 9)}


def test_a_set_has_tasks_of_its_own_and_several_answers_to_each():
    of = EvaluationConfig(tasks=2, first_task=7, samples=3, temperature=0.6, top_p=0.9)
    tasks = curriculum(sampling={"stop": ["x"], "include_stop": True}).evaluation("hard step 4", 9, of)
    assert [t.data["index"] for t in tasks] == [7, 7, 7, 8, 8, 8]
    assert len({t.task_id for t in tasks}) == len({t.group_id for t in tasks}) == 6, "each answer is a task"
    assert {(t.sampling.temperature, t.sampling.top_p, t.group_size) for t in tasks} == {(0.6, 0.9, 1)}
    assert {(tuple(t.sampling.stop), t.sampling.include_stop) for t in tasks} == {(("x",), True)}
    assert all(curriculum().is_evaluation(t.group_id) for t in tasks)


def test_a_set_may_have_the_tasks_of_one_environment():
    tasks = curriculum().evaluation("x", 0, EvaluationConfig(tasks=1, env="hard"))
    assert [t.data for t in tasks] == [{"index": 0, "split": "heldout", "env": "hard"}]


def test_a_new_lineage_deals_out_again_what_was_under_way_under_new_names():
    c = curriculum()
    old = c.refill(version=0, lockstep=True)
    c.free(old[0].group_id)
    fresh = curriculum(epoch=6)
    tasks = fresh.restore(c.state())
    assert {t.data["index"] for t in tasks} == {old[-1].data["index"]}
    assert not {t.task_id for t in tasks} & {t.task_id for t in old}
    assert fresh.next_index == c.next_index


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(0, 4), st.integers(1, 4))
def test_capacity_is_never_exceeded(settles, lag, groups_per_batch):
    c = curriculum(max_policy_lag=lag, batch_trajectories=4 * groups_per_batch)
    for choice in settles:
        c.refill(version=0, lockstep=False)
        assert sum(map(len, c.outstanding.values())) == (lag + 1) * 4 * groups_per_batch
        c.free(list(c.outstanding)[choice % len(c.outstanding)])


@pytest.mark.parametrize("train_on", ["trajectories", "windows"])
@given(st.lists(st.integers(0, 50), max_size=60), st.integers(0, 2))
def test_where_members_are_trained_alone_the_smallest_room_is_filled(train_on, settles, lag):
    """A whole group's place may never be free; with a lag of 0, the learner would then wait for ever."""
    c = curriculum(train_on=train_on, max_policy_lag=lag)
    dealt = []
    for choice in settles:
        dealt += c.refill(version=0, lockstep=False)
        out = [task for tasks in c.outstanding.values() for task in tasks]
        assert len(out) == (lag + 1) * 8
        gone = out[choice % len(out)]
        c.free_member(gone.group_id, gone.task_id)
        assert not c.awaits(gone.group_id, gone.task_id)
    assert [(task.data["index"], task.member) for task in dealt] == [divmod(i, 4) for i in range(len(dealt))]


def test_a_group_dealt_out_in_part_is_dealt_out_to_the_end_after_a_restart():
    c = curriculum(train_on="trajectories", max_policy_lag=0)
    c.refill(version=0, lockstep=False)
    c.free_member("5g0", "5g0.2")
    assert [task.task_id for task in c.refill(version=0, lockstep=False)] == ["5g2.0"]
    fresh = curriculum(epoch=6, train_on="trajectories", max_policy_lag=0)
    again = fresh.restore(c.state())
    assert [task.task_id for task in again][:4] == ["6g0.0", "6g0.1", "6g0.3", "6g1.0"]
    fresh.free("6g0")
    assert [task.task_id for task in fresh.refill(version=0, lockstep=False)] == ["6g2.1", "6g2.2", "6g2.3"]


def test_in_lockstep_what_is_dealt_out_again_waits_for_the_weights_of_the_restart():
    c = curriculum()
    c.refill(version=3, lockstep=True)
    assert {task.min_policy_version for task in curriculum(epoch=6).restore(c.state(), min_version=9)} == {9}


def test_a_lineage_keeps_its_names_over_epochs_and_evaluation_does_not():
    c = curriculum(epoch=7, lineage=5)
    assert c.refill(version=0, lockstep=False)[0].task_id == "5g0.0"
    assert c.evaluation("x", 0, GREEDY)[0].task_id == "7eval-x-0"
    assert c.is_evaluation("7eval-x-0")
    assert not c.is_evaluation("5eval-x-0")


def test_a_learner_that_continues_takes_over_what_the_broker_holds():
    c = curriculum()
    c.refill(version=0, lockstep=False)
    c.free("5g0")
    c.refill(version=0, lockstep=False)
    fresh = curriculum(epoch=6, lineage=5)
    fresh.restore(c.state())
    held = [f"5g{i}.{m}" for i in (0, 2, 3, 9) for m in range(4)] + [
        "5g4.1",
        "3g80.0",
        "elsewhere",
        "6eval-x-0",
    ]
    again = {task.task_id for task in fresh.adopt(held)}
    assert {int(group.rpartition("g")[2]) for group in fresh.outstanding} == {1, 2, 3, 4, 5, 6, 9}
    assert again == {f"5g{i}.{m}" for i in (1, 5, 6) for m in range(4)} | {"5g4.0", "5g4.2", "5g4.3"}
    for group in list(fresh.outstanding):
        fresh.free(group)
    assert fresh.refill(version=0, lockstep=False)[0].task_id == "5g10.0"


def test_members_that_are_trained_alone_are_taken_over_alone():
    c = curriculum(train_on="trajectories", max_policy_lag=0)
    c.refill(version=0, lockstep=False)
    fresh = curriculum(epoch=6, lineage=5, train_on="trajectories", max_policy_lag=0)
    fresh.restore(c.state())
    again = fresh.adopt(["5g1.3", "5g3.1"])
    assert {t.task_id for t in again} == {f"5g0.{m}" for m in range(4)} | {"5g1.0", "5g1.1", "5g1.2"}
    for group in list(fresh.outstanding):
        fresh.free(group)
    assert [t.task_id for t in fresh.refill(version=0, lockstep=False)][:3] == ["5g3.2", "5g3.3", "5g4.0"]


def test_a_learner_without_a_checkpoint_deals_out_nothing_twice():
    fresh = curriculum(epoch=6, lineage=5)
    assert fresh.adopt(["5g7.0", "5g7.1", "5g7.2", "5g7.3"]) == []
    assert list(fresh.outstanding) == ["5g7"]
    assert fresh.refill(version=0, lockstep=False)[0].group_id == "5g8"
    empty = curriculum(epoch=6, lineage=5)
    assert empty.adopt([]) == []
    assert empty.refill(version=0, lockstep=False)[0].group_id == "5g0"
