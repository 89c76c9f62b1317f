"""A lag that is forced is exact: the batch of step s was sampled wholly by version s - L, or the first one."""

import pytest

from learner.config import LearnerConfig
from learner.curriculum import Curriculum
from learner.inlet import Group, Inlet
from tests.trajectories import make_trajectory


@pytest.mark.parametrize("lag", [0, 1, 3, 8])
def test_every_batch_lags_exactly(lag):
    """The rule of `Exchange.collect`, on a system that samples at once whatever it is asked for."""
    config = LearnerConfig(group_size=2, batch_trajectories=4, max_policy_lag=0, forced_lag=lag, steps=12)
    curriculum = Curriculum("calculator", config)
    inlet = Inlet(curriculum, filter_uniform=False)
    put = 0
    for step in range(config.steps):
        left = config.steps - step
        tasks = curriculum.refill(version=step, lockstep=True, steps_left=left)
        put += len(tasks)
        assert {task.min_policy_version for task in tasks} <= {step}
        for group_id in dict.fromkeys(task.group_id for task in reversed(tasks)):  # they end in any order
            members = [make_trajectory(f"{group_id}.{i}", group=group_id, version=step) for i in range(2)]
            inlet.ready.append(Group(group_id, group_id, members))
            inlet._leases[group_id] = group_id
        assert len(inlet.ready) == min(lag + 1, left) * config.units_per_batch
        groups = inlet.take(config.units_per_batch, in_order=True)
        versions = {int(t.policy_version.max()) for group in groups for t in group.trajectories}
        assert versions == {max(0, step - lag)}
        inlet.commit(0, step, groups)
    assert put == config.steps * config.batch_trajectories
    assert not curriculum.outstanding


def test_a_greedy_member_is_dealt_with_each_group():
    config = LearnerConfig.model_validate(
        {
            "group_size": 2,
            "batch_trajectories": 4,
            "max_policy_lag": 0,
            "algorithm": {"advantage": {"kind": "greedy"}},
        }
    )
    curriculum = Curriculum("calculator", config)
    tasks = curriculum.refill(version=0, lockstep=False)
    assert [task.sampling.temperature for task in tasks] == [1.0, 1.0, 0.0] * 2
    assert {task.group_size for task in tasks} == {3}
    assert {task.purpose for task in tasks} == {"train"}
    curriculum.settle(tasks[0].group_id)
    assert len(curriculum.refill(version=0, lockstep=False)) == 3
