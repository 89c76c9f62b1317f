"""Which tasks come next, and how many may be under way. Pure: no sockets, no clocks.

The bound on policy lag is kept before any work starts: with at most ``(max_policy_lag + 1) * batch`` trajectories
under way or waiting, a task put at version v is trained at version v + max_policy_lag at the latest, because
every batch that is trained raises the version by one and takes the oldest first (the admission rule of AReaL,
arXiv:2505.24298, section 4).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from learner.config import LearnerConfig
from protocol import names
from protocol.messages import Sampling, Task

"""Lineage, index and member of a training task's id."""


@dataclass
class Curriculum:
    """Deals out task indices in order and counts what is under way.

    ``outstanding`` maps a group's id to its tasks, from when they are dealt out until they are trained or
    dropped: all at once, or member by member where the learner does not train on whole groups.

    Training tasks are named by the *lineage* of checkpoints they belong to, so that a learner that continues one
    finds what was put by the process before it; evaluation tasks by the *epoch*, which is this process's own.

    Example:
        >>> c = Curriculum("gym", LearnerConfig(group_size=2, batch_trajectories=4, max_policy_lag=1))
        >>> tasks = c.refill(version=0, lockstep=False)
        >>> len(tasks), tasks[0].group_id, tasks[0].task_id
        (8, '0g0', '0g0.0')
        >>> c.free("0g0"); len(c.refill(version=0, lockstep=False))
        2
    """

    env: str
    config: LearnerConfig
    epoch: int = 0
    next_index: int = 0
    outstanding: dict[str, list[Task]] = field(default_factory=dict)
    _dealt: int = 0
    """Members of the group ``next_index`` that are dealt out already."""
    lineage: int = -1
    """Epoch with which it began; -1: with this one."""

    def __post_init__(self) -> None:
        if self.lineage < 0:
            self.lineage = self.epoch

    def capacity(self, lockstep: bool, steps_left: int | None = None) -> int:
        """Trajectories that may be under way or waiting, as the lag bound allows.

        No more is asked for than is trained until the end, where it is known how much that is: a trajectory
        may have many windows, or few.
        """
        config = self.config
        batches = (config.forced_lag if lockstep else config.max_policy_lag) + 1
        if steps_left is not None and config.train_on != "windows":
            batches = min(batches, steps_left)
        return batches * config.units_per_batch * (config.group_members if self._whole_groups else 1)

    def refill(
        self, *, version: int, lockstep: bool, steps_left: int | None = None, backlog: int = 0
    ) -> list[Task]:
        """New tasks up to capacity; in lockstep they wait for weights of ``version``.

        Groups are dealt out whole, or member by member where members are trained by themselves: there a room
        smaller than a group may be all that ever becomes free.

        Args:
            backlog: what waits to be trained beside whole trajectories; it takes room too.
        """
        tasks: list[Task] = []
        room = self.capacity(lockstep, steps_left) - sum(map(len, self.outstanding.values())) - backlog
        size = self.config.group_members
        while room >= (size if self._whole_groups else 1):
            dealt = self._dealt
            members = range(dealt, min(size, dealt + room))
            tasks += self._group(self.next_index, version if lockstep else 0, members)
            room -= len(members)
            self._dealt = members.stop % size
            self.next_index += not self._dealt
        return tasks

    @property
    def _whole_groups(self) -> bool:
        return self.config.train_on == "groups"

    def free(self, group_id: str) -> None:
        """This group is trained or dropped; its room is free again."""
        self.outstanding.pop(group_id, None)

    def free_member(self, group_id: str, task_id: str) -> None:
        """This member is trained or dropped."""
        left = [task for task in self.outstanding.get(group_id, []) if task.task_id != task_id]
        if left:
            self.outstanding[group_id] = left
        else:
            self.free(group_id)

    def owns(self, group_id: str) -> bool:
        """Whether this lineage asked for the group (tasks of an earlier epoch are not ours)."""
        return group_id in self.outstanding

    def awaits(self, group_id: str, task_id: str) -> bool:
        """Whether this member of the group is neither trained nor dropped yet."""
        return any(task.task_id == task_id for task in self.outstanding.get(group_id, []))

    def evaluation(self, tag: str, version: int) -> list[Task]:
        """Held-out tasks, greedy, sampled by ``version`` or a later one."""
        sampling = self._sampling(temperature=0.0)
        ids = [names.evaluation_id(self.epoch, tag, i) for i in range(self.config.evaluation_tasks)]
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
            for i, name in enumerate(ids)
        ]

    def is_evaluation(self, group_id: str) -> bool:
        """Whether a group is one of `evaluation`'s."""
        return names.is_evaluation(group_id, self.epoch)

    def state(self) -> dict[str, Any]:
        """For the checkpoint: how far tasks are dealt out, and those that are not done with."""
        unfinished = [
            [names.group_index(group), [task.member for task in tasks]]
            for group, tasks in self.outstanding.items()
        ]
        return {
            "lineage": self.lineage,
            "next_index": self.next_index,
            "dealt": self._dealt,
            "unfinished": sorted(unfinished),
        }

    def restore(self, state: dict[str, Any], min_version: int = 0) -> list[Task]:
        """Continue from a checkpoint; returns the tasks that were under way, named by the present lineage.

        Args:
            min_version: in lockstep, the version published after the restart.
        """
        self.next_index, self._dealt = state["next_index"], state["dealt"]
        self.outstanding.clear()
        unfinished = state["unfinished"]
        return [task for index, members in unfinished for task in self._group(index, min_version, members)]

    def adopt(self, task_ids: Iterable[str]) -> list[Task]:
        """Take over what the broker holds of this lineage; returns the tasks that it has to be told of again.

        Those are what a checkpoint says is under way and the broker does not hold: it has never heard of them, or
        they are over, and it will say so. Nothing that it holds is dealt out again, whoever put it.
        """
        held = {place for task_id in task_ids if (place := self._place(task_id)) is not None}
        known, cursor = self._under_way(), (self.next_index, self._dealt)
        beyond = {place for place in held if place >= cursor}
        wanted = known | beyond
        if self._whole_groups:  # a group is settled as a whole; what was not put of it can come no other way
            wanted |= {(index, m) for index, _ in wanted & held for m in range(self.config.group_members)}
        self.outstanding.clear()
        tasks = [task for index, member in sorted(wanted) for task in self._group(index, 0, [member])]
        if beyond:
            self.next_index, self._dealt = self._after(*max(beyond))
        return [task for task in tasks if self._place(task.task_id) not in held]

    def _under_way(self) -> set[tuple[int, int]]:
        tasks = (task for group in self.outstanding.values() for task in group)
        return {(names.group_index(task.group_id), task.member) for task in tasks}

    def _place(self, task_id: str) -> tuple[int, int] | None:
        """Index and member of a training task of this lineage."""
        name = names.training_task(task_id)
        if name is None or name.lineage != self.lineage:
            return None
        return name.group_index, name.member

    def _after(self, index: int, member: int) -> tuple[int, int]:
        """Where dealing goes on behind this member of this group."""
        last = self._whole_groups or member + 1 == self.config.group_members
        return (index + 1, 0) if last else (index, member + 1)

    def _group(self, index: int, min_version: int, members: Sequence[int]) -> list[Task]:
        """Tasks of these members of a group; the one after the last trained is greedy."""
        group_id = names.group_id(self.lineage, index)
        size = self.config.group_members
        temperature = self.config.sampling.temperature
        tasks = [
            Task(
                task_id=names.task_id(group_id, member),
                group_id=group_id,
                group_size=size,
                member=member,
                env=self.env,
                data={"index": index, "split": "train"},
                sampling=self._sampling(temperature=temperature if member < self.config.group_size else 0.0),
                min_policy_version=min_version,
            )
            for member in members
        ]
        self.outstanding[group_id] = self.outstanding.get(group_id, []) + tasks
        return tasks

    def _sampling(self, *, temperature: float) -> Sampling:
        return Sampling(
            temperature=temperature,
            max_turn_tokens=self.config.sampling.max_turn_tokens,
            max_trajectory_tokens=self.config.sampling.max_trajectory_tokens,
        )
