"""Which tasks come next, and how many may be under way. Pure: no sockets, no clocks.

The bound on policy lag is kept before any work starts: with at most ``(max_policy_lag + 1) * batch`` trajectories
under way or waiting, a task put at version v is trained at version v + max_policy_lag at the latest, because
every batch that is trained raises the version by one and takes the oldest first (the admission rule of AReaL,
arXiv:2505.24298, section 4).
"""

from dataclasses import dataclass, field
from typing import Any

from learner.config import LearnerConfig
from protocol.messages import Sampling, Task


@dataclass
class Curriculum:
    """Deals out task indices in order and counts what is under way.

    ``outstanding`` maps a group's id to its tasks, from when they are dealt out until the group is trained or
    dropped.

    Example:
        >>> c = Curriculum("gym", LearnerConfig(group_size=2, batch_trajectories=4, max_policy_lag=1))
        >>> tasks = c.refill(version=0, lockstep=False)
        >>> len(tasks), tasks[0].group_id, tasks[0].task_id
        (8, '0g0', '0g0.0')
        >>> c.settle("0g0"); len(c.refill(version=0, lockstep=False))
        2
    """

    env: str
    config: LearnerConfig
    epoch: int = 0
    next_index: int = 0
    outstanding: dict[str, list[Task]] = field(default_factory=dict)

    def capacity(self, lockstep: bool) -> int:
        """Trajectories that may be under way or waiting."""
        lag = 0 if lockstep else self.config.max_policy_lag
        return (lag + 1) * self.config.batch_trajectories

    def refill(self, *, version: int, lockstep: bool) -> list[Task]:
        """New tasks up to capacity, whole groups only; in lockstep they wait for weights of ``version``."""
        tasks: list[Task] = []
        room = self.capacity(lockstep) - sum(map(len, self.outstanding.values()))
        while room >= self.config.group_size:
            tasks += self._group(self.next_index, version if lockstep else 0)
            self.next_index += 1
            room -= self.config.group_size
        return tasks

    def settle(self, group_id: str) -> None:
        """This group is trained or dropped; its room is free again."""
        self.outstanding.pop(group_id, None)

    def owns(self, group_id: str) -> bool:
        """Whether this lineage asked for the group (tasks of an earlier epoch are not ours)."""
        return group_id in self.outstanding

    def evaluation(self, tag: str, version: int) -> list[Task]:
        """Held-out tasks, greedy, sampled by ``version`` or a later one."""
        sampling = self._sampling(temperature=0.0)
        names = [f"{self.epoch}eval-{tag}-{i}" for i in range(self.config.evaluation_tasks)]
        return [
            Task(
                task_id=name,
                group_id=name,
                group_size=1,
                env=self.env,
                data={"index": i, "split": "heldout"},
                purpose="eval",
                sampling=sampling,
                min_policy_version=version,
            )
            for i, name in enumerate(names)
        ]

    def is_evaluation(self, group_id: str) -> bool:
        """Whether a group is one of `evaluation`'s."""
        return group_id.startswith(f"{self.epoch}eval-")

    def state(self) -> dict[str, Any]:
        """For the checkpoint. Groups under way are dealt out again after a restart."""
        unfinished = [int(group.split("g")[1]) for group in self.outstanding]
        return {"next_index": self.next_index, "unfinished": sorted(unfinished)}

    def restore(self, state: dict[str, Any], epoch: int) -> list[Task]:
        """Continue from a checkpoint under a new epoch; returns the tasks to put again."""
        self.epoch = epoch
        self.next_index = state["next_index"]
        self.outstanding.clear()
        return [task for index in state["unfinished"] for task in self._group(index, 0)]

    def _group(self, index: int, min_version: int) -> list[Task]:
        group_id = f"{self.epoch}g{index}"
        size = self.config.group_size
        tasks = [
            Task(
                task_id=f"{group_id}.{member}",
                group_id=group_id,
                group_size=size,
                member=member,
                env=self.env,
                data={"index": index, "split": "train"},
                sampling=self._sampling(temperature=self.config.sampling.temperature),
                min_policy_version=min_version,
            )
            for member in range(size)
        ]
        self.outstanding[group_id] = tasks
        return tasks

    def _sampling(self, *, temperature: float) -> Sampling:
        return Sampling(
            temperature=temperature,
            max_turn_tokens=self.config.sampling.max_turn_tokens,
            max_trajectory_tokens=self.config.sampling.max_trajectory_tokens,
        )
