"""A forced lag is exact: version s - L, or the first version, sampled the whole batch of step s."""

import queue

import numpy as np
import pytest

from learner.curriculum import Curriculum
from learner.intake.session import BrokerSession
from learner.settings.learner import LearnerConfig
from protocol import names
from protocol.codec import decode, encode_arrays, encode_delivery
from protocol.messages.episodes import Deliver, PutTasks, Reward, Segment, Task, Turn


class System:
    """A stand-in for link, broker, actors and generators; it samples at the newest version, in any order."""

    def __init__(self, seed, *, uniform_share):
        self.rng, self.uniform_share = np.random.default_rng(seed), uniform_share
        self.inbox, self.session = self, None
        self.version = 0
        self.waiting: dict[str, list[Task]] = {}

    def send(self, message, join=None):
        if isinstance(message, PutTasks):
            for task in message.tasks:
                assert task.min_policy_version <= self.version
                self.waiting.setdefault(task.group_id, []).append(task)

    def get_nowait(self):
        if not self.waiting:
            raise queue.Empty
        return self.rollout(str(self.rng.choice(sorted(self.waiting))))

    def get(self, timeout):
        return self.get_nowait()

    def rollout(self, group_id):
        """Return the delivery of a group that the newest version has sampled."""
        uniform = self.rng.random() < self.uniform_share
        members = [self.segment(task, 0.0 if uniform else task.member) for task in self.waiting.pop(group_id)]
        head = Deliver(unit_id=group_id, segments=len(members))
        return decode(encode_delivery(head, members))

    def segment(self, task, reward):
        segment = Segment(
            trajectory_id=f"{task.task_id}.0",
            task_id=task.task_id,
            group_id=task.group_id,
            group_size=task.group_size,
            index=0,
            offset=0,
            tokens=2,
            action_tokens=1,
            status="finished",
            turns=[Turn(0, 0, 1, False), Turn(1, 1, 2, True)],
            rewards=[Reward("score", 1, float(reward))],
        )
        arrays = {
            "token_ids": np.array([1, 2], dtype=np.int32),
            "action_mask": np.array([0, 1], dtype=np.uint8),
            "logp_behaviour": np.array([0.0, -0.5], dtype=np.float32),
            "policy_version": np.array([-1, self.version], dtype=np.int32),
        }
        return tuple(encode_arrays(segment, arrays)[1:3])


@pytest.mark.parametrize("lag", [0, 1, 3, 8])
@pytest.mark.parametrize("uniform_share", [0.0, 0.5])
def test_every_batch_lags_exactly(lag, uniform_share):
    """The lag is exact even if groups are filtered out: groups of the same version take their place."""
    config = LearnerConfig(group_size=2, batch_trajectories=4, max_policy_lag=0, forced_lag=lag, steps=12)
    system = System(lag, uniform_share=uniform_share)
    curriculum = Curriculum("calculator", config)
    exchange = BrokerSession(system, curriculum, config, lockstep=True, stop_reason=lambda: "")
    trained = []
    for step in range(config.steps):
        groups = exchange.collect(step=step, version=step)
        assert not system.waiting, "nothing is sampled while the weights change"
        assert len(groups) == 2
        versions = {int(t.policy_version.max()) for group in groups for t in group.trajectories}
        assert versions == {max(0, step - lag)}
        trained += [names.group_index(group.group_id) for group in groups]
        exchange.commit(groups, step=step + 1)
        system.version = step + 1
        if step + 1 < config.steps:
            exchange.refill(step=step + 1, version=step + 1)
    assert trained == sorted(trained)
    assert not curriculum.outstanding, "no more was asked for than could be trained"
    dropped = exchange.intake.counts.total("uniform")
    assert curriculum.next_index * 2 == config.steps * 4 + dropped
    assert (dropped > 0) == (uniform_share > 0)


def test_without_lockstep_the_lag_is_not_forced():
    config = LearnerConfig(group_size=2, batch_trajectories=4, max_policy_lag=0, forced_lag=3, steps=12)
    system = System(0, uniform_share=0.0)
    exchange = BrokerSession(
        system, Curriculum("calculator", config), config, lockstep=False, stop_reason=lambda: ""
    )
    assert len(exchange.collect(step=0, version=0)) == 2
    assert not exchange.intake.ready


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
    curriculum.free(tasks[0].group_id)
    assert len(curriculum.refill(version=0, lockstep=False)) == 3
