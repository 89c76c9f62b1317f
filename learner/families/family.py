"""The groups of a family, and what comes of them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from learner.trajectory import Trajectory, Unit, UnitPart
from protocol import names
from protocol.messages.episodes import TaskStart

UNBEGUN = "without_note"
"""Outcome of a member that an actor of an earlier version played without the note or the prefix of its task."""


@dataclass(frozen=True)
class ChildTask:
    """One task that a family asks for."""

    note: str = ""
    start: TaskStart | None = None
    """Prefix from which the episode begins."""
    index: int | None = None
    """Number of the task, if it is a different one than the family's."""
    policy: str = ""
    """Teacher that plays it; "" is the policy."""

    def is_begun_by(self, t: Trajectory, plain: Trajectory) -> bool:
        """Return whether a trajectory began as this task asks for: an actor before protocol 4.3 knows neither part, and
        one before 4.7 no teacher.

        Args:
            t: what was played.
            plain: a member of the first group, which has neither note nor prefix.
        """
        if bool(self.policy) != (t.origin == "taught"):
            return False
        noted = prompt_of(t)
        if self.note and np.array_equal(noted, prompt_of(plain)):
            return False
        if self.start is None:
            return True
        prefix = np.frombuffer(self.start.token_ids, "<i4")
        if self.note:
            # The prompt has the note; the prefix has none.
            prefix = np.concatenate([noted, prefix[self.start.turns[0].end :]])
        kept = np.array_equal(t.token_ids[: len(prefix)], prefix)
        return kept and not t.action_mask[: len(prefix)].any()


@dataclass(frozen=True)
class FamilyStage:
    """One group of a family, as it was delivered."""

    group_id: str
    unit_id: str = ""
    """Name of the delivery; "" if the group will not come."""
    members: Sequence[Trajectory] = ()
    """Members that can be trained. Empty if the group is lost, or if all its members failed."""
    unbegun: Sequence[Trajectory] = ()
    """Members that an actor of an earlier version played without the note or the prefix of their task."""

    @property
    def number(self) -> int:
        """Number of the stage; 0 is the group that was dealt out."""
        return names.stage_of(self.group_id)

    @property
    def tokens(self) -> int:
        """Action tokens of all members."""
        return sum(t.window_tokens for t in (*self.members, *self.unbegun))

    def checked(self, first: "FamilyStage", children: Sequence[ChildTask]) -> "FamilyStage":
        """Return the stage without the members that did not begin as their tasks ask for.

        The others get the name of the trajectory that their prefix was cut from.

        Args:
            first: the family's first group.
            children: tasks of this stage, by member.
        """
        if not first.members or not children:
            return self
        plain = first.members[0]
        begun, unbegun = [], []
        for t in self.members:
            child = children[member_of(t)] if member_of(t) < len(children) else None
            if child is None or not child.is_begun_by(t, plain):
                unbegun.append(t)
            else:
                begun.append(t if child.start is None else replace(t, parent=child.start.parent))
        return replace(self, members=begun, unbegun=unbegun)


@dataclass
class TaskFamily:
    """The groups of a family that have been delivered or are lost, in the order of their stages."""

    family_id: str
    stages: list[FamilyStage] = field(default_factory=list)
    hints: Sequence[str] = ()
    """Hints to the task, from the weakest to the strongest."""

    @property
    def index(self) -> int:
        """Place of the family in the order in which groups were dealt out."""
        return names.group_index(self.family_id)

    def add_stage(self, stage: FamilyStage, children: Sequence[ChildTask] = ()) -> None:
        """Add the next stage.

        Args:
            stage: the group.
            children: its tasks, by member; empty if they are not known.
        """
        self.stages.append(stage.checked(self.stages[0], children) if self.stages else stage)
        if not self.hints:
            self.hints = next((t.hints for t in stage.members if t.hints), ())


@dataclass(frozen=True)
class Settled:
    """Decision about the members of a family."""

    trained: Sequence[Trajectory]
    """Trajectories that are trained, as members of one group."""
    dropped: Mapping[str, Sequence[Trajectory]]
    """The others, by the outcome under which they are counted."""
    proposals: tuple[str | None, ...] = ()
    """Instructions that the policy proposed; None for a proposal that cannot be read."""

    def unit(self, family: TaskFamily) -> Unit:
        """Return the family as one unit. Each group that was delivered is a part of it."""
        fate = {id(t): outcome for outcome, dropped in self.dropped.items() for t in dropped}
        parts = []
        for stage in family.stages:
            trained = [t for t in stage.members if id(t) not in fate]
            outcomes = dict.fromkeys(fate[id(t)] for t in stage.members if id(t) in fate)
            dropped = {name: [t for t in stage.members if fate.get(id(t)) == name] for name in outcomes}
            if stage.unbegun:
                dropped[UNBEGUN] = list(stage.unbegun)
            if stage.unit_id:
                parts.append(UnitPart(stage.unit_id, trained, dropped))
        return Unit(family.family_id, family.family_id, list(self.trained), tuple(parts), self.proposals)


def prompt_of(t: Trajectory) -> NDArray[np.int32]:
    """Return the tokens of the first prompt of a trajectory."""
    return t.token_ids[: t.turns[0].end] if t.turns else t.token_ids[: t.prompt_tokens]


def member_of(t: Trajectory) -> int:
    """Return the place of a trajectory's task in its group; 0 if its name says none."""
    task = names.training_task(names.task_of(t.trajectory_id))
    return 0 if task is None else task.member
