"""The groups of a family, and what comes of them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from learner.trajectory import Trajectory
from learner.units import Unit, UnitPart
from protocol import names

UNBEGUN = "without_note"
"""Outcome of a member that an actor of an earlier version played without the note of its task."""


@dataclass(frozen=True)
class ChildTask:
    """One task that a family asks for."""

    note: str


@dataclass(frozen=True)
class FamilyStage:
    """One group of a family, as it was delivered."""

    group_id: str
    unit_id: str = ""
    """Name of the delivery; "" if the group will not come."""
    members: Sequence[Trajectory] = ()
    """Members that can be trained. Empty if the group is lost, or if all its members failed."""
    unbegun: Sequence[Trajectory] = ()
    """Members that an actor of an earlier version played without the note of their task."""

    @property
    def number(self) -> int:
        """Number of the stage; 0 is the group that was dealt out."""
        return names.stage_of(self.group_id)

    @property
    def tokens(self) -> int:
        """Action tokens of all members."""
        return sum(t.window_tokens for t in (*self.members, *self.unbegun))

    def checked(self, first: "FamilyStage") -> "FamilyStage":
        """Return the stage without the members that lack the note of their task.

        A note changes the tokens of the first prompt, so a member whose prompt is that of the first group has none.
        """
        if not first.members:
            return self
        plain = _prompt(first.members[0])
        begun = [t for t in self.members if not np.array_equal(_prompt(t), plain)]
        lacking = [t for t in self.members if np.array_equal(_prompt(t), plain)]
        return replace(self, members=begun, unbegun=lacking)


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

    def add(self, stage: FamilyStage) -> None:
        """Add the next stage."""
        self.stages.append(stage.checked(self.stages[0]) if self.stages else stage)
        if not self.hints:
            self.hints = next((t.hints for t in stage.members if t.hints), ())


@dataclass(frozen=True)
class Settled:
    """What becomes of the members of a family."""

    trained: Sequence[Trajectory]
    """Trajectories that are trained, as members of one group."""
    dropped: Mapping[str, Sequence[Trajectory]]
    """The others, by the outcome under which they are counted."""

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
        return Unit(family.family_id, family.family_id, list(self.trained), tuple(parts))


def _prompt(t: Trajectory) -> NDArray[np.int32]:
    return t.token_ids[: t.turns[0].end] if t.turns else t.token_ids[: t.prompt_tokens]
