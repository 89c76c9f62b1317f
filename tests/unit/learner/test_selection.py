"""A list of tasks is dealt again and again, each epoch in an order of its own."""

import json

import msgspec
import numpy as np
import pytest
from pydantic import ValidationError

from learner.advantages import assign_advantages
from learner.budget import group_sizes
from learner.curriculum import Curriculum
from learner.families.family import ChildTask
from learner.selection import Answer, TaskStats, choose, near_weights, repeated_share, task_index
from learner.settings.budget import UncertaintyBudget
from learner.settings.learner import EvaluationConfig, LearnerConfig
from learner.settings.rules import contradictions
from learner.settings.selection import EpochsSelection, FilterSelection, ValueSelection
from protocol.names import choice_of
from tests.trajectories import make_trajectory


def curriculum(seed=0, **settings):
    config = LearnerConfig(group_size=2, batch_trajectories=20, max_policy_lag=0, **settings)
    return Curriculum("e", config, seed=seed)


def dealt(tasks):
    return [task.data["index"] for task in tasks if task.member == 0]


EPOCHS = {"kind": "epochs", "tasks": 5}


def test_by_default_a_group_has_the_task_of_its_number():
    assert dealt(curriculum().refill(version=0, lockstep=False)) == list(range(10))


def test_each_epoch_deals_every_task_once_in_an_order_of_its_own():
    numbers = dealt(curriculum(selection=EPOCHS).refill(version=0, lockstep=False))
    assert sorted(numbers[:5]) == sorted(numbers[5:]) == [0, 1, 2, 3, 4]
    assert numbers[:5] != numbers[5:]


def test_the_seed_of_the_run_decides_the_order():
    first, again, other = (
        dealt(curriculum(seed, selection=EPOCHS).refill(version=0, lockstep=False)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_restart_in_the_middle_of_an_epoch_goes_on_in_it():
    before = curriculum(selection=EPOCHS)
    tasks = before.refill(version=0, lockstep=False)
    before.free("0g3")
    after = Curriculum("e", before.config, epoch=2, lineage=0)
    again = after.restore(before.state())
    assert {t.task_id: t.data for t in again} == {t.task_id: t.data for t in tasks if t.group_id != "0g3"}
    assert dealt(after.refill(version=0, lockstep=False)) == [task_index(EpochsSelection(tasks=5), 10)]


def test_a_family_that_asks_for_other_tasks_gets_those_of_the_list():
    asking = curriculum(selection=EPOCHS, family={"kind": "guided"})
    asking.refill(version=0, lockstep=False)
    asking.ask("0g0", 1, [ChildTask(index=number) for number in (3, 7, 99)])
    assert all(task.data["index"] < 5 for task in asking.outstanding["0g0r1"])


def test_a_list_without_tasks_is_refused():
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        EpochsSelection(tasks=0)


def test_prompts_come_again_within_a_number_of_groups():
    assert repeated_share(["a", "b", "c", "a"], groups=2) == 0
    assert repeated_share(["a", "b", "c", "a"], groups=3) == 0.25
    assert repeated_share([], groups=3) == 0


NEAR = {"kind": "near", "tasks": 40}


def test_a_group_says_in_its_name_which_task_was_chosen():
    tasks = curriculum(selection=NEAR).refill(version=0, lockstep=False)
    assert all(choice_of(task.group_id).task == task.data["index"] for task in tasks)
    assert len(set(dealt(tasks))) == 10, "a task is under way once while there are others"


def test_evaluations_are_those_of_a_run_that_chooses_nothing():
    of = EvaluationConfig(tasks=5)
    plain, chosen = (curriculum(**s).evaluation("before", 0, of) for s in ({}, {"selection": NEAR}))
    assert plain == chosen


def test_a_choice_is_in_the_checkpoint_and_comes_again_under_another_lineage():
    before = curriculum(selection=NEAR)
    tasks = before.refill(version=0, lockstep=False)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(before.state()))
    after = Curriculum("e", before.config, epoch=2)
    again = after.restore(state)
    assert dealt(again) == dealt(tasks)
    assert after.stats.dealt.tolist() == before.stats.dealt.tolist()
    assert all(task.task_id.startswith("2g") for task in again)


def test_a_checkpoint_of_a_run_that_chose_nothing_is_gone_on_from():
    before = curriculum()
    before.refill(version=0, lockstep=False)
    after = Curriculum("e", curriculum(selection=NEAR).config, lineage=0)
    after.restore(before.state())
    assert not after.adopt(task.task_id for tasks in before.outstanding.values() for task in tasks)
    assert set(after.outstanding) == set(before.outstanding)


def test_a_group_behind_the_checkpoint_keeps_its_task_whatever_was_learnt_since():
    before = curriculum(selection=NEAR)
    state = before.state()
    held = [task.task_id for task in before.refill(version=0, lockstep=False)]
    # The broker has lost the eleventh message, and holds a part of the tenth.
    after = Curriculum("e", before.config, lineage=0, seed=1)
    after.restore(state)
    after.stats.add(0, 0, [Answer(1.0)])
    again = after.adopt(held[:-1])
    assert [task.task_id for task in again] == held[-1:]
    assert after.next_index == 10
    assert after.stats.dealt.sum() == 10


def test_members_that_come_one_by_one_have_the_task_of_their_group():
    settings = {"selection": NEAR, "train_on": "trajectories"}
    one = curriculum(**settings)
    one.refill(version=0, lockstep=False)
    one.free_member(next(iter(one.outstanding)), one.outstanding[next(iter(one.outstanding))][0].task_id)
    (task,) = one.refill(version=0, lockstep=False)
    assert task.member == 0
    assert one.state()["begun"]
    after = Curriculum("e", one.config, lineage=0)
    after.restore(one.state())
    after.adopt(task.task_id for tasks in one.outstanding.values() for task in tasks)
    after.free_member(task.group_id, task.task_id)
    assert [t.group_id for t in after.refill(version=0, lockstep=False)] == [task.group_id]


@pytest.mark.parametrize("kind", ["failures", "value"])
def test_a_choice_by_whole_groups_is_refused_where_there_are_none(kind):
    config = LearnerConfig(selection={"kind": kind}, train_on="windows")
    assert any("goes by whole groups" in line for line in contradictions(config))


def trajectory(group, number, reward, **settings):
    return make_trajectory(f"{group}.{number}.0", group=group, reward=reward, **settings)


def test_a_group_counts_when_it_is_over_and_failed_episodes_do_not():
    it = curriculum(selection=NEAR)
    it.refill(version=0, lockstep=False)
    group = next(iter(it.outstanding))
    task = choice_of(group).task
    members = [
        trajectory(group, 0, 1.0),
        trajectory(group, 1, 0.0, correct=False),
        trajectory(group, 2, 9.0, status="failed"),
        trajectory(group, 3, 9.0, temperature=0.0),
        trajectory(group + "r1", 0, 9.0),
    ]
    it.note_ended(group, members)
    assert (it.stats.attempts[task], it.stats.right[task], it.stats.total[task]) == (2, 1, 1)
    assert it.selection_metrics()["selection/informative_share"] == 1.0


@pytest.mark.parametrize("reward", [1e200, 1.7e308])
def test_a_choice_survives_rewards_of_any_size(reward):
    stats = TaskStats(tasks=3)
    for task in range(3):
        stats.deal(task)
        stats.add(task, task, [Answer(reward), Answer(-reward)])
    config = ValueSelection(tasks=3, explore=0.0)
    again = TaskStats.restored(3, 16.0, json.loads(json.dumps(stats.state())))
    for each in (stats, again):
        rng = np.random.default_rng(0)
        assert {choose(config, each, rng) for _ in range(40)} == {0, 1, 2}


def test_a_task_whose_first_group_was_lost_is_not_filtered_out():
    """A failed environment says nothing of a task."""
    config, stats = FilterSelection(tasks=3), TaskStats(tasks=3)
    for task in range(3):
        stats.deal(task)
    stats.add(1, 1, [Answer(0.0)])
    stats.add(2, 2, [Answer(1.0)])
    rng = np.random.default_rng(0)
    assert {choose(config, stats, rng) for _ in range(20)} == {0, 2}
    assert {choose(config, stats, rng, busy=[0]) for _ in range(20)} == {2}, "its group may come yet"


def test_the_nearest_task_is_taken_at_any_temperature():
    free = np.array([True, True, False])
    weights = near_weights(np.array([0.1, 0.3, 0.5]), free, target=0.5, temperature=5e-324)
    assert weights.tolist() == [0.0, 1.0, 0.0]


def test_answers_are_shared_out_anew_only_when_further_ones_have_come(monkeypatch):
    asked = []

    def sizes(*arguments):
        asked.append(arguments)
        return group_sizes(*arguments)

    monkeypatch.setattr("learner.curriculum.group_sizes", sizes)
    it = curriculum(selection=EpochsSelection(tasks=6), budget=UncertaintyBudget())
    assert it.refill(version=0, lockstep=False)
    assert len(it.outstanding) > 1
    assert len(asked) == 1, "for all groups that are dealt out at a time"
    group = next(iter(it.outstanding))
    it.note_ended(group, [trajectory(group, number, 1.0) for number in range(4)])
    it.free(group)
    it.refill(version=0, lockstep=False)
    assert len(asked) == 2
    again = curriculum(selection=EpochsSelection(tasks=6), budget=UncertaintyBudget())
    again.refill(version=0, lockstep=False)
    again.restore(it.state())
    again.free(next(iter(again.outstanding)))
    again.refill(version=0, lockstep=False)
    assert len(asked) == 4, "the answers of a checkpoint are others"


def test_advantages_are_divided_by_the_uses_that_the_name_says():
    plain, often = ([trajectory(f"0g1t5{uses}", n, float(n)) for n in range(2)] for uses in ("", "u4"))
    config = LearnerConfig().algorithm
    once, four = (assign_advantages(config, members).advantage for members in (plain, often))
    assert once.any()
    assert (four == once / 4).all()
