"""A list of tasks is dealt again and again, each epoch in an order of its own."""

import pytest
from pydantic import ValidationError

from learner.curriculum import Curriculum
from learner.families.family import ChildTask
from learner.selection import repeated_share, task_index
from learner.settings.learner import LearnerConfig
from learner.settings.selection import EpochsSelection


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
