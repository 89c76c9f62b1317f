"""Decides which tasks come next and how many may be under way, and whether anything is left to learn from them. Pure.

The curriculum enforces the bound on policy lag before any work starts. At most
``(max_policy_lag + 1) * batch`` trajectories are under way or waiting. Each trained batch raises the version
by one and takes the oldest trajectories first. So a task put at version v is trained at version
v + max_policy_lag at the latest. This is the admission rule of AReaL (arXiv:2505.24298, section 4).

`SignalWatch` counts episodes that fail and groups with equal returns, and ends a run in which nothing that arrives
can be trained.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from learner.budget import group_sizes
from learner.errors import NothingToLearn, Stopped
from learner.families.family import ChildTask
from learner.population import Population
from learner.rewards import forced_mode
from learner.selection import Answer, TaskStats, choose, left_out, task_index
from learner.settings.advantages import ModesReward
from learner.settings.budget import SharedBudget
from learner.settings.families import ProposeFamily
from learner.settings.learner import EvaluationConfig, LearnerConfig
from learner.settings.selection import (
    ChosenSelection,
    FilterSelection,
    PopulationSelection,
    PruneSelection,
    TaskList,
    ValueSelection,
)
from learner.trajectory import Trajectory
from learner.under_way import UnderWay
from protocol import names
from protocol.failures import FailureCounts, failure_or_text
from protocol.messages.episodes import Sampling, Task
from protocol.names import PLAIN, Choice, TrainingTask


@dataclass
class Curriculum:
    """Deals out groups in order, each with the task that `learner.selection` chooses, and counts the tasks under way.

    ``outstanding`` maps a group's id to its tasks, from the time they are dealt out until they are trained or
    dropped. A group is removed as a whole, or member by member if the learner does not train on whole groups. The
    groups of a family are removed together, and the first one has taken up the room of all.

    The id of a training task contains the *lineage* of checkpoints, so that a learner that continues a
    lineage recognises the tasks of earlier processes. The id of an evaluation task contains the *epoch* of
    this process.

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
    """Number of members of the group ``next_index`` that are already dealt out."""
    lineage: int = -1
    """Epoch that began the lineage; -1: this process's epoch."""
    seed: int = 0
    """Seed of the run, for the order of the tasks."""
    over_unseen: list[str] = field(default_factory=list)
    """Tasks that were dealt out behind the checkpoint and that the broker no longer held when `adopt` was called. What
    was chosen for them is lost, so they are named without it."""
    stats: TaskStats | None = None
    """What the answers so far show of each task; None: tasks are not chosen by them."""
    population: Population | None = None
    """Instructions, one of which stands behind the prompt of each group; None: there are none."""
    under_way: UnderWay | None = None
    """What keeps the work under way below the bound; None: the bound alone does, see `learner.under_way`."""
    entropy: float | None = None
    """Mean entropy of the last batch in nats, which chooses the temperature of a lane; None: not measured."""
    _asked: list[Task] = field(default_factory=list)
    """Tasks that families have asked for and that are not put yet."""
    _begun: Choice = PLAIN
    """What was chosen for the group ``next_index``, of which some members are dealt out."""
    _plain_size: int = 0
    """Members of a group whose name says no number: as many as the settings said when the run began. The broker knows a
    group by its size, so it keeps it when the run goes on with other settings."""
    _damped: tuple[int, int] = (0, 0)
    """Groups that were dealt since the last `selection_metrics`, and those of them with divided advantages."""
    _sizes: list[float] = field(default_factory=list)
    """Members of these groups, if they are shared out by task."""
    _shares: NDArray[np.int64] | None = None
    """Members of the next group of each task, [tasks], until further answers come; None: not shared out yet."""

    def __post_init__(self) -> None:
        if self.lineage < 0:
            self.lineage = self.epoch
        self._plain_size = self._plain_size or self.config.first_members
        if self.config.under_way == "needed":
            self.under_way = UnderWay(self.config.units_per_batch)
        if self.stats is None:
            self.stats = self._stats_of(None)
        if self.population is None:
            self.population = self._population_of(None)

    def capacity(self, lockstep: bool, steps_left: int | None = None) -> int:
        """Return how many trajectories may be under way or waiting under the lag bound.

        Args:
            lockstep: whether run.mode is "sync"; then `forced_lag` is the bound.
            steps_left: learner steps left in the run. No more trajectories are asked for than they train,
                except with windows, because the number of windows of a trajectory is not known.
        """
        config = self.config
        batches = (config.forced_lag if lockstep else config.max_policy_lag) + 1
        if steps_left is not None and config.train_on != "windows":
            batches = min(batches, steps_left)
        units = batches * config.units_per_batch
        if config.family is not None and not lockstep:
            # A family takes a round trip for each of its groups, so fewer families keep the lag bound.
            units = max(config.units_per_batch, units // (config.family.stages + 1))
        if self.under_way is not None and not lockstep:
            units = self.under_way.wanted(units)
        return units * (config.first_members if self._whole_groups else 1)

    @property
    def wanted_trajectories(self) -> float | None:
        """How many trajectories may be under way; None if nothing but the bound decides it."""
        return None if self.under_way is None else float(self.capacity(lockstep=False))

    def _stats_of(self, saved: Mapping[str, Any] | None) -> TaskStats | None:
        """Return the stats of a checkpoint, or new ones; None if nothing is chosen by them."""
        selection = self.config.selection
        if isinstance(selection, ChosenSelection):
            size = selection.tasks, selection.half_life
        elif isinstance(selection, TaskList) and isinstance(self.config.budget, SharedBudget):
            size = selection.tasks, ChosenSelection().half_life
        else:
            return None
        return TaskStats(*size) if saved is None else TaskStats.restored(*size, saved)

    def _population_of(self, saved: Mapping[str, Any] | None) -> Population | None:
        """Return the population of a checkpoint, or a new one; None if the settings have no instructions."""
        selection, family = self.config.selection, self.config.family
        if not isinstance(selection, PopulationSelection):
            return None
        return Population(selection, saved, family.most if isinstance(family, ProposeFamily) else 0)

    def selection_metrics(self) -> dict[str, float]:
        """Return the metrics `selection/...` of a learner step; empty if nothing is chosen by the answers."""
        if self.population is not None:
            return self.population.gauges()
        if self.stats is None:
            return {}
        metrics, (groups, damped), selection = self.stats.gauges(), self._damped, self.config.selection
        self._damped = 0, 0
        if isinstance(selection, PruneSelection | FilterSelection):
            metrics["selection/left_out_share"] = float(left_out(selection, self.stats).mean())
        if isinstance(selection, ValueSelection) and groups:
            metrics["selection/damped_share"] = damped / groups
        sizes, self._sizes = self._sizes, []
        if sizes:
            metrics |= {
                "selection/group_size_mean": float(np.mean(sizes)),
                "selection/group_size_max": max(sizes),
            }
        return metrics

    def refill(
        self, *, version: int, lockstep: bool, steps_left: int | None = None, backlog: int = 0
    ) -> list[Task]:
        """Deal out new tasks up to the capacity.

        Groups are dealt out whole. If the learner does not train on whole groups, they are dealt out member
        by member, because the room that becomes free may always be smaller than a group.

        Args:
            version: newest policy version; in lockstep the tasks wait for its weights.
            lockstep: whether run.mode is "sync".
            steps_left: learner steps left in the run.
            backlog: waiting windows of unfinished trajectories; they take up room too.

        Returns:
            Tasks that families have asked for, then new ones.
        """
        tasks, self._asked = self._asked, []
        room = self.capacity(lockstep, steps_left) - self._taken - backlog
        size = self.config.first_members
        while room >= (size if self._whole_groups else 1):
            dealt = self._dealt
            if not dealt:
                self._begun = self._choose(self.next_index)
            # A group of any size takes the room of a mean one: the lag bound counts groups.
            count = self._size_of(self._begun)
            members = range(dealt, count if self._whole_groups else min(count, dealt + room))
            tasks += self._group(self.next_index, version if lockstep else 0, members, self._begun)
            room -= size if self._whole_groups else len(members)
            self._dealt = members.stop % count
            self.next_index += not self._dealt
        return tasks

    @property
    def _taken(self) -> int:
        """Room that is taken; the first group of a family takes up the room of all its groups."""
        mean = self.config.first_members if isinstance(self.config.budget, SharedBudget) else None
        return sum(
            mean or len(tasks) for group, tasks in self.outstanding.items() if not names.stage_of(group)
        )

    def ask(self, family_id: str, stage: int, children: Sequence[ChildTask]) -> None:
        """Make the tasks of a family's next group, which the next `refill` returns.

        They have the sampling, the smallest version and, but for the task of another group, the data of the family's
        first group.
        """
        first, group_id = self.outstanding[family_id][0], names.stage_id(family_id, stage)
        self.outstanding[group_id] = tasks = [
            replace(
                first,
                task_id=names.task_id(group_id, member),
                group_id=group_id,
                group_size=len(children),
                member=member,
                note=child.note,
                start=child.start,
                policy=child.policy,
                data=first.data if child.index is None else {**first.data, "index": self._task(child.index)},
            )
            for member, child in enumerate(children)
        ]
        self._asked += tasks

    @property
    def _whole_groups(self) -> bool:
        return self.config.train_on == "groups"

    def free(self, group_id: str) -> None:
        """Free the room of a group that is trained or dropped, with all groups that it has asked for."""
        if self.outstanding.pop(group_id, None) is None or self.config.family is None:
            return
        for group in [group for group in self.outstanding if names.family_of(group) == group_id]:
            del self.outstanding[group]
        self._asked = [task for task in self._asked if names.family_of(task.group_id) != group_id]

    def free_member(self, group_id: str, task_id: str) -> None:
        """Free the room of a member of a group that is trained or dropped."""
        left = [task for task in self.outstanding.get(group_id, []) if task.task_id != task_id]
        if left:
            self.outstanding[group_id] = left
        else:
            self.free(group_id)

    def owns(self, group_id: str) -> bool:
        """Return whether this lineage put the group, or a group that asks for it, and waits for it."""
        return names.family_of(group_id) in self.outstanding

    def awaits(self, group_id: str, task_id: str) -> bool:
        """Return whether this member of the group is neither trained nor dropped yet."""
        return any(task.task_id == task_id for task in self.outstanding.get(group_id, []))

    def evaluation(self, tag: str, version: int, of: EvaluationConfig) -> list[Task]:
        """Return the held-out tasks of a set, sampled by ``version`` or a later one.

        The answers to one task follow each other.
        """
        sampling = self._sampling(temperature=of.temperature, top_p=of.top_p, train=False)
        ids = [names.evaluation_id(self.epoch, tag, i) for i in range(of.answers)]
        only = {"env": of.env} if of.env else {}
        return [
            Task(
                task_id=name,
                group_id=name,
                group_size=1,
                env=self.env,
                data={"index": of.first_task + i // of.samples, "split": "heldout", **only},
                purpose="eval",
                sampling=sampling,
                min_policy_version=version,
                deadline_s=self.config.sampling.max_trajectory_s,
            )
            for i, name in enumerate(ids)
        ]

    def is_evaluation(self, group_id: str) -> bool:
        """Return whether the group is one that `evaluation` made."""
        return names.is_evaluation(group_id, self.epoch)

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint: how far tasks are dealt out, and which are under way."""
        unfinished = [
            [names.group_index(group), [task.member for task in tasks], *_saved(names.choice_of(group))]
            for group, tasks in self.outstanding.items()
            # The others are asked for again by the first group, which the broker delivers again.
            if not names.stage_of(group)
        ]
        return {
            "lineage": self.lineage,
            "plain_size": self._plain_size,
            "next_index": self.next_index,
            "dealt": self._dealt,
            "unfinished": sorted(unfinished),
            **({"begun": _saved(self._begun)} if self._dealt and self._begun != PLAIN else {}),
            **({} if self.stats is None else {"stats": self.stats.state()}),
            **({} if self.population is None else {"population": self.population.state()}),
            **({} if self.config.lane is None else {"entropy": self.entropy}),
        }

    def checkpointed(self) -> list[tuple[int, str]]:
        """Note that the newest `state` was written. Return the instructions that are new in it, with their numbers."""
        return [] if self.population is None else self.population.covered()

    def restore(self, state: dict[str, Any], min_version: int = 0) -> list[Task]:
        """Continue from a checkpoint; return the tasks that were under way, named by the present lineage.

        Args:
            state: state from a checkpoint.
            min_version: smallest version that may sample the tasks; in lockstep, the one published after the
                restart.
        """
        self.next_index, self._dealt = state["next_index"], state["dealt"]
        self._plain_size = state.get("plain_size", self._plain_size)
        self._begun = _restored(state.get("begun", ()))
        self.stats, self._shares = self._stats_of(state.get("stats")), None
        self.population = self._population_of(state.get("population"))
        self.entropy = state.get("entropy")
        self.outstanding.clear()
        return [
            task
            for index, members, *chosen in state["unfinished"]
            for task in self._group(index, min_version, members, _restored(chosen))
        ]

    def adopt(self, task_ids: Iterable[str]) -> list[Task]:
        """Take over the tasks of this lineage that the broker holds; return the tasks to put again.

        Those are the tasks that are under way according to the checkpoint and that the broker does not hold.
        Either it never received them, or they are over, and it will answer so. A task that the broker holds
        is not dealt out again, whichever process put it.
        """
        held = {task_id: name for task_id in task_ids if (name := self._name(task_id)) is not None}
        known, cursor = self._under_way(), (self.next_index, self._dealt)
        here = {_place(name) for name in held.values()}
        choices = {name.group_index: name.choice for name in (*held.values(), *known)}
        beyond = {place for place in here if place >= cursor}
        wanted = {_place(name) for name in known} | beyond
        if self._whole_groups:
            # A group is trained or dropped as a whole, so its members that were never put must be put now.
            wanted |= {(index, m) for index, _ in wanted & here for m in range(self._size_of(choices[index]))}
        self.outstanding.clear()
        tasks = [
            task
            for index, member in sorted(wanted)
            for task in self._group(index, 0, [member], choices[index])
        ]
        if beyond:
            last = max(beyond)
            end = self._after(*last, self._size_of(choices[last[0]]))
            self.over_unseen = [
                names.task_id(names.group_id(self.lineage, index), member)
                for index, member in self._dealt_between(cursor, end)
                if (index, member) not in wanted
            ]
            self._count_dealt(sorted({index for index, _ in beyond}), cursor, choices)
            self._begun = choices.get(end[0], PLAIN)
            self.next_index, self._dealt = end
        return [task for task in tasks if task.task_id not in held]

    def _count_dealt(
        self, groups: Sequence[int], cursor: tuple[int, int], choices: Mapping[int, Choice]
    ) -> None:
        """Count groups that an earlier process dealt out behind the checkpoint."""
        for index in groups:
            task = choices[index].task
            # A group that was begun before the checkpoint was counted then.
            if self.stats is not None and task is not None and (index, 0) >= cursor:
                self.stats.deal(task)

    def _dealt_between(self, first: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Yield group index and member of what is dealt out from one place on, up to another one.

        A group of which nothing is known is taken to have the plain size.
        """
        for index in range(first[0], end[0] + 1):
            for member in range(self._plain_size):
                if first <= (index, member) < end:
                    yield index, member

    def _under_way(self) -> list[TrainingTask]:
        tasks = (task for group in self.outstanding.values() for task in group)
        under_way = (names.training_task(task.task_id) for task in tasks)
        return [name for name in under_way if name is not None and not name.stage]

    def _name(self, task_id: str) -> TrainingTask | None:
        """Return the parts of the name of a task of this lineage that was dealt out; None for other tasks."""
        name = names.training_task(task_id)
        return None if name is None or name.lineage != self.lineage or name.stage else name

    def _size_of(self, choice: Choice) -> int:
        """Return the number of members of a group."""
        return choice.size or self._plain_size

    def _after(self, index: int, member: int, size: int) -> tuple[int, int]:
        """Return the index and member to deal out after this member of this group of ``size`` members."""
        last = self._whole_groups or member + 1 == size
        return (index + 1, 0) if last else (index, member + 1)

    def _choose(self, group: int) -> Choice:
        """Choose for a group that is about to be dealt out, and count it."""
        selection, stats, budget = self.config.selection, self.stats, self.config.budget
        now = self.config.first_members
        size = None if now == self._plain_size else now
        # Seeded by the number of the group, so that a restart draws the same again.
        rng = np.random.default_rng([self.seed, group])
        if self.population is not None:
            return Choice(instruction=self.population.choose(rng), size=size)
        if stats is None:
            return Choice(size=size)
        if isinstance(selection, ChosenSelection):
            under_way = (names.choice_of(group_id).task for group_id in self.outstanding)
            task = choose(selection, stats, rng, {task for task in under_way if task is not None})
        else:
            task = self._task(group)
        divide = isinstance(selection, ValueSelection) and selection.divide
        uses = stats.uses(task) if divide else 1
        stats.deal(task)
        self._damped = self._damped[0] + 1, self._damped[1] + (uses > 1)
        if isinstance(budget, SharedBudget):
            if self._shares is None:
                self._shares = group_sizes(budget, stats, self.config.group_size)
            size = int(self._shares[task])
            self._sizes.append(size)
        return Choice(task=task, size=size, uses=uses)

    def note_ended(
        self, group_id: str, members: Iterable[Trajectory], proposals: Sequence[str | None] = ()
    ) -> None:
        """Note the answers of a group, or of some of its members, that are trained or dropped now.

        Failed episodes say nothing of the task, and neither do greedy baselines, members of other groups and those
        that were forced into a mode.

        Args:
            group_id: name of the group.
            members: its members, with those of further groups that it asked for.
            proposals: instructions that its family brings; None for one that cannot be read.
        """
        choice = names.choice_of(group_id)
        if self.population is not None:
            self.population.propose(proposals)
        counted, number = (
            (self.stats, choice.task) if self.population is None else (self.population, choice.instruction)
        )
        if counted is None or number is None:
            return
        ended = [t for t in members if t.group_id == group_id and t.status not in ("failed", "unfinished")]
        rule = self.config.reward.group
        if isinstance(rule, ModesReward):
            ended = [t for t in ended if not forced_mode(rule, t)]
        answers = [Answer(t.return_, t.correct) for t in ended if not (t.baseline or t.lane)]
        counted.add(number, names.group_index(group_id), answers)
        self._shares = None

    def _group(
        self, index: int, min_version: int, members: Sequence[int], choice: Choice = PLAIN
    ) -> list[Task]:
        """Make the tasks of these members of a group; those after the trained ones are greedy, or of a lane."""
        group_id = names.group_id(self.lineage, index, choice)
        size = self._size_of(choice)
        tasks = [
            Task(
                task_id=names.task_id(group_id, member),
                group_id=group_id,
                group_size=size,
                member=member,
                env=self.env,
                data={"index": self._task(index) if choice.task is None else choice.task, "split": "train"},
                sampling=self._sampling(temperature=self._temperature(member)),
                min_policy_version=min_version,
                deadline_s=self.config.sampling.max_trajectory_s,
                note=self._instruction(choice),
                opening=self._opening(member, size),
            )
            for member in members
        ]
        self.outstanding[group_id] = self.outstanding.get(group_id, []) + tasks
        return tasks

    def instruction_of(self, group_id: str) -> str:
        """Return the instruction behind the prompt of a group, by its name; "" if it has none."""
        return self._instruction(names.choice_of(group_id))

    def _instruction(self, choice: Choice) -> str:
        """Return the instruction of a group; "" if it has none."""
        if self.population is None or choice.instruction is None:
            return ""
        return self.population.text(choice.instruction)

    def _opening(self, member: int, group_size: int) -> str:
        """Return the words with which a member of a group begins its first answer; "" if it chooses them."""
        rule = self.config.reward.group
        if not isinstance(rule, ModesReward):
            return ""
        return rule.openings.get(rule.of_member(member, group_size), "")

    def _temperature(self, member: int) -> float:
        """Return the sampling temperature of a member of a group."""
        if member == self.config.greedy_member:
            return 0.0
        if self.config.lane is not None and member >= self.config.group_members:
            return self.config.lane.temperature(self.entropy)
        return self.config.sampling.temperature

    def _task(self, group: int) -> int:
        return task_index(self.config.selection, group, self.seed)

    def _sampling(self, *, temperature: float, top_p: float = 1.0, train: bool = True) -> Sampling:
        return Sampling(
            temperature=temperature,
            top_p=top_p,
            max_turn_tokens=self.config.sampling.max_turn_tokens,
            max_trajectory_tokens=self.config.sampling.max_trajectory_tokens,
            max_context_tokens=self.config.sampling.max_context_tokens,
            stop=list(self.config.sampling.stop),
            include_stop=self.config.sampling.include_stop,
            routes=train and self.config.algorithm.routes == "behaviour",
        )


def _place(name: TrainingTask) -> tuple[int, int]:
    """Return group index and member of a task."""
    return name.group_index, name.member


def _saved(choice: Choice) -> list[list[int | None]]:
    """Return a choice for the checkpoint, as a list that is empty if nothing was chosen."""
    return [] if choice == PLAIN else [list(choice)]


def _restored(saved: Sequence[Sequence[Any]]) -> Choice:
    return Choice(*saved[0]) if saved else PLAIN


MOST = 0.5
"""Share of failed episodes from which on they are the reason why groups have no two different returns."""
SOLVED = "no group has anything left to learn from"
"""Reason why a run ends whose groups once had a signal, and have none any more."""


@dataclass
class Streak:
    """Number of like things in a row, and since when `look` has seen it without a break."""

    length: int = 0
    ever_broken: bool = False
    """True if anything unlike has ever come."""
    _began: float | None = None

    def grow(self) -> None:
        self.length += 1

    def end(self) -> None:
        self.length, self.ever_broken, self._began = 0, True, None

    def look(self, now: float) -> float:
        """Return for how many seconds this row has grown, as far as `look` has been called."""
        if self.length and self._began is None:
            self._began = now
        return 0.0 if self._began is None else now - self._began


@dataclass
class SignalWatch:
    """Counts of episodes and groups, and the rows of failures and of groups with equal returns.

    Example:
        >>> watch = SignalWatch()
        >>> watch.group([0.0, 1.0], uniform=False); watch.group([1.0, 1.0], uniform=True)
        >>> watch.groups, watch.uniform_groups, watch.uniform.length, watch.uniform_return
        (2, 1, 1, 1.0)
    """

    episodes: int = 0
    """Episodes that ended, in training and evaluation."""
    failures: FailureCounts = field(default_factory=FailureCounts)
    groups: int = 0
    """Training groups of which at least one member did not fail."""
    uniform_groups: int = 0
    """Number of these groups whose returns are all equal."""
    uniform_return: float = 0.0
    """Return of the last group with equal returns."""
    failed: Streak = field(default_factory=Streak)
    uniform: Streak = field(default_factory=Streak)

    def episode(self, trajectory: Trajectory) -> None:
        """Count an episode that ended. A failure without fault neither lengthens nor ends the row."""
        self.episodes += 1
        if trajectory.status != "failed":
            self.failed.end()
            return
        failure = failure_or_text(trajectory.failure, trajectory.error)
        self.failures.add(failure)
        if failure.fault:
            self.failed.grow()

    def group(self, returns: Sequence[float], *, uniform: bool) -> None:
        """Count a training group that is complete, by the returns of its members that did not fail."""
        if not returns:
            return
        self.groups += 1
        if not uniform:
            self.uniform.end()
            return
        self.uniform_groups += 1
        self.uniform_return = returns[0]
        self.uniform.grow()

    def look(self, config: LearnerConfig, now: float, *, training: bool = True, trained: bool = True) -> None:
        """End the run if the rows are longer than the settings allow.

        A row that follows on something better must also last `data_timeout_s`: a service that a reward needs may
        come back. A row of failures before the first step need not, because nothing would be lost.

        Args:
            config: for `max_failed_episodes`, `max_uniform_groups` and `data_timeout_s`.
            now: monotonic time in seconds.
            training: whether the learner waits for groups. Their returns end no evaluation, because the run whose
                groups have nothing left is evaluated once more.
            trained: whether anything was trained so far.

        Raises:
            NothingToLearn: all episodes fail, or no group so far had different returns.
            Stopped: groups had different returns, but have none any more.
        """
        failed_s, uniform_s = self.failed.look(now), self.uniform.look(now)
        if self.failed.length >= config.max_failed_episodes and (
            not (trained and self.failed.ever_broken) or failed_s > config.data_timeout_s
        ):
            raise NothingToLearn(self._all_fail(config))
        if not training or self.uniform.length < config.max_uniform_groups:
            return
        if not self.uniform.ever_broken:
            raise NothingToLearn(self._all_uniform(config))
        if uniform_s > config.data_timeout_s:
            raise Stopped(f"{SOLVED}: {self.uniform.length} in a row with equal returns, {self._last_return}")

    def state(self) -> dict[str, Any]:
        """Return the counts for the checkpoint and for ``result.json``; rows begin anew."""
        return {
            "episodes": self.episodes,
            "failed": self.failures.total,
            "failures": self.failures.rows(),
            "groups": self.groups,
            "uniform_groups": self.uniform_groups,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.episodes, self.groups = state["episodes"], state["groups"]
        self.uniform_groups = state["uniform_groups"]
        self.failures = FailureCounts.from_rows(state["failed"], state["failures"])
        self.failed.ever_broken = self.episodes > self.failures.total
        self.uniform.ever_broken = self.groups > self.uniform_groups

    @property
    def failed_share(self) -> float:
        """Share of all episodes that failed."""
        return self.failures.total / max(1, self.episodes)

    def _all_fail(self, config: LearnerConfig) -> str:
        row = self.failed.length
        return (
            f"{row} of {row} episodes failed, one after the other: {self.failures.sentence()}; correct this, then "
            f"start again (learner.max_failed_episodes is {config.max_failed_episodes})"
        )

    def _all_uniform(self, config: LearnerConfig) -> str:
        if self.failed_share >= MOST:
            return (
                f"{self.failed_share:.0%} of episodes failed, and in each of the first {self.uniform.length} groups "
                f"the others have equal returns: {self.failures.sentence()}; correct this, then start again "
                f"(learner.max_uniform_groups is {config.max_uniform_groups})"
            )
        failed = (
            f" {self.failed_share:.0%} of episodes failed: {self.failures.sentence()};"
            if self.failures.total
            else ""
        )
        return (
            f"each of the first {self.uniform.length} groups has equal returns ({self._last_return}), so there is "
            f"nothing to learn;{failed} make the reward depend on the answer, or the tasks easier or harder, or "
            f"raise learner.sampling.temperature (learner.max_uniform_groups is {config.max_uniform_groups})"
        )

    @property
    def _last_return(self) -> str:
        return f"{self.uniform_return:g} in the last one"
