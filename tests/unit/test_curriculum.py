"""What is under way never exceeds the capacity that the lag bound allows."""

from hypothesis import given
from hypothesis import strategies as st

from learner.config import LearnerConfig
from learner.curriculum import Curriculum


def curriculum(**settings):
    values = {
        "group_size": 4,
        "batch_trajectories": 8,
        "max_policy_lag": 2,
        "evaluation_tasks": 3,
        **settings,
    }
    return Curriculum("calculator", LearnerConfig(**values), epoch=5)


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
    c.settle(first[0].group_id)
    again = c.refill(version=0, lockstep=False)
    assert len({t.group_id for t in again}) == 1
    assert {t.data["index"] for t in again} == {6}


def test_members_of_a_group_share_the_task():
    group = curriculum().refill(version=0, lockstep=True)[:4]
    assert len({t.group_id for t in group}) == 1
    assert len({t.data["index"] for t in group}) == 1
    assert [t.member for t in group] == [0, 1, 2, 3]


def test_evaluation_is_greedy_on_held_out_tasks_and_waits_for_its_version():
    tasks = curriculum().evaluation("after", 9)
    assert [t.data for t in tasks] == [{"index": i, "split": "heldout"} for i in range(3)]
    assert {(t.sampling.temperature, t.purpose, t.min_policy_version) for t in tasks} == {(0.0, "eval", 9)}


def test_a_restart_deals_out_again_what_was_under_way_under_new_names():
    c = curriculum()
    old = c.refill(version=0, lockstep=True)
    c.settle(old[0].group_id)
    fresh = curriculum()
    tasks = fresh.restore(c.state(), epoch=6)
    assert {t.data["index"] for t in tasks} == {old[-1].data["index"]}
    assert not {t.task_id for t in tasks} & {t.task_id for t in old}
    assert fresh.next_index == c.next_index


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(0, 4), st.integers(1, 4))
def test_capacity_is_never_exceeded(settles, lag, groups_per_batch):
    c = curriculum(max_policy_lag=lag, batch_trajectories=4 * groups_per_batch)
    for choice in settles:
        c.refill(version=0, lockstep=False)
        assert sum(map(len, c.outstanding.values())) == (lag + 1) * 4 * groups_per_batch
        c.settle(list(c.outstanding)[choice % len(c.outstanding)])
