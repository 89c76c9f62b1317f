"""Decides what a family does next: it asks for further tasks, or it is trained. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from learner.errors import CannotRetrain
from learner.families.branching import (
    kept_steps,
    next_branches,
    next_retries,
    settle_branches,
    settle_retries,
)
from learner.families.family import ChildTask, FamilyStage, Settled, TaskFamily
from learner.families.judging import next_judgements, readable, settle_judgements
from learner.families.notes import (
    AnswerText,
    first_answer,
    is_solved,
    next_after_drafts,
    next_guided,
    next_hint,
    next_refined,
    settle_drafts,
    settle_guided,
    settle_hints,
    settle_refined,
)
from learner.families.proposing import next_proposal, read_proposals, settle_proposals
from learner.families.teaching import next_steered, next_taught, settle_steered, settle_taught
from learner.families.verdicts import READ, REJECTED, next_verdicts, settle_verdicts, verdict_acts
from learner.settings.families import (
    BranchFamily,
    DraftFamily,
    FamilyConfig,
    GuidedFamily,
    HintFamily,
    JudgeFamily,
    ProposeFamily,
    RefineFamily,
    RetryFamily,
    SteeredFamily,
    TaughtFamily,
    VerdictFamily,
)
from learner.trajectory import Trajectory, Unit
from protocol import names
from protocol.messages.episodes import Task


@dataclass(frozen=True)
class Surroundings:
    """Facts that a reaction may use beside the family: settings of the run that do not change."""

    group_size: int
    """Members of a group that is trained."""
    decode: AnswerText
    """Turns the tokens of an answer into text."""
    room: int = 0
    """Most tokens of a trajectory."""
    seed: int = 0
    """Seed of the run."""
    demonstrations: Sequence[Trajectory] = ()
    """Solved tasks that somebody else wrote, for families of kind "steered"."""
    instruction: str = ""
    """The instruction behind the family's prompt, which its name says; for families of kind "propose"."""


def react(config: FamilyConfig, family: TaskFamily, around: Surroundings) -> Sequence[ChildTask]:
    """Return the tasks of the family's next group; none if the family is to be trained.

    A reaction depends on the delivered members and the settings alone, never on a clock, a version or a count. So a
    learner that is restarted asks for the same tasks again, and the broker ignores those that it has seen.

    Args:
        config: kind of the family.
        family: its groups so far, at least one.
        around: settings of the run.
    """
    match config:
        case HintFamily():
            return next_hint(config, family, around.group_size)
        case DraftFamily():
            return next_after_drafts(config, family, around.group_size, around.decode)
        case JudgeFamily():
            return next_judgements(config, family, around.group_size, around.decode)
        case VerdictFamily():
            return next_verdicts(config, family, around.decode)
        case RefineFamily():
            return next_refined(config, family, around.group_size, room=around.room, decode=around.decode)
        case BranchFamily():
            rng = np.random.default_rng([around.seed, family.index])
            return next_branches(config, family, group_size=around.group_size, room=around.room, rng=rng)
        case RetryFamily():
            budget = around.group_size - config.rollouts
            return next_retries(config, family, budget=budget, room=around.room, decode=around.decode)
        case GuidedFamily():
            rng = np.random.default_rng([around.seed, family.index])
            return next_guided(config, family, around.group_size, around.decode, rng)
        case SteeredFamily():
            rng = np.random.default_rng([around.seed, family.index])
            return next_steered(config, family, around.demonstrations, around.decode, rng)
        case TaughtFamily():
            return next_taught(config, family)
        case ProposeFamily():
            return next_proposal(config, family, around.instruction, around.decode)
        case _:
            assert_never(config)


def settle(config: FamilyConfig, family: TaskFamily, decode: AnswerText | None = None) -> Settled:
    """Return what is trained of a family, and why the rest is not. Each member is in one of the two.

    Args:
        config: kind of the family.
        family: all its groups.
        decode: turns the tokens of an answer into text; families of kind "judge" and "verdict" need it.
    """
    match config:
        case HintFamily():
            return settle_hints(config, family)
        case DraftFamily():
            return settle_drafts(family)
        case JudgeFamily():
            assert decode is not None, "judgements are read"
            return settle_judgements(config, family, decode)
        case VerdictFamily():
            assert decode is not None, "judgements are read"
            return settle_verdicts(config, family, decode)
        case RefineFamily():
            return settle_refined(family)
        case BranchFamily():
            return settle_branches(family)
        case RetryFamily():
            return settle_retries(config, family)
        case GuidedFamily():
            return settle_guided(config, family)
        case SteeredFamily():
            return settle_steered(config, family)
        case TaughtFamily():
            return settle_taught(config, family)
        case ProposeFamily():
            return settle_proposals(config, family, decode)
        case _:
            assert_never(config)


PARTS: Mapping[str, tuple[str, ...]] = {
    "hint": ("family/hinted_right_share",),
    "draft": ("family/improved_share",),
    "judge": ("family/readable_share",),
    "verdict": (READ, REJECTED),
    "refine": ("family/refined_share",),
    "branch": ("family/branched_share",),
    "retry": ("family/retried_right_share",),
    "guided": ("family/guided_right_share",),
    "steered": ("family/steered_right_share",),
    "taught": ("family/taught_right_share",),
    "propose": (READ,),
}
"""Metrics of the part that a kind of family is named for, which is idle while they are 0."""
NAMED = "family/named_share"
"""The same for retries that begin where a reflection says."""
TAUGHT_GROUPS = "family/taught_group_share"
"""Metric of the share of all groups that got a right answer of a teacher."""


def parts_of(config: FamilyConfig) -> tuple[str, ...]:
    """Return the metrics that are above 0 if the part acts that the family is named for.

    Example:
        >>> parts_of(JudgeFamily())
        ('family/readable_share',)
    """
    named = isinstance(config, RetryFamily) and config.begin == "named"
    return (*PARTS[config.kind], *((NAMED,) if named else ()))


def acts_of(config: FamilyConfig, family: TaskFamily, decode: AnswerText) -> dict[str, list[float]]:
    """Return for each metric of `parts_of` 1 or 0 for every member that could show it; see `learner.gauges`.

    The share of refined episodes is not here, because it is of the trained batch.
    """
    first, *later = family.stages
    members = [t for stage in later for t in stage.members]
    match config:
        case HintFamily() | GuidedFamily() | SteeredFamily() | TaughtFamily():
            last = members if isinstance(config, HintFamily) else _of_stage(family, config.stages)
            values = [float(is_solved(config, t)) for t in last]
            if isinstance(config, TaughtFamily):
                return {PARTS[config.kind][0]: values, TAUGHT_GROUPS: [max(values, default=0.0)]}
        case DraftFamily():
            best = max((t.return_ for t in first.members), default=0.0)
            values = [float(t.return_ > best) for t in members]
        case JudgeFamily():
            values = readable(config, family, decode)
        case VerdictFamily():
            return {name: list(values) for name, values in verdict_acts(config, family, decode).items()}
        case BranchFamily():
            values = [float(bool(t.parent)) for t in members]
        case RetryFamily():
            values = [float(is_solved(config, t)) for t in _of_stage(family, config.stages)]
            if config.begin == "named":
                named = [float(kept_steps(first_answer(t, decode)) > 0) for t in _of_stage(family, 1)]
                return {PARTS[config.kind][0]: values, NAMED: named}
        case ProposeFamily():
            values = [float(text is not None) for text in read_proposals(config, family, decode)]
        case RefineFamily():
            return {}
        case _:
            assert_never(config)
    return {PARTS[config.kind][0]: values}


def _of_stage(family: TaskFamily, number: int) -> list[Trajectory]:
    return [t for stage in family.stages if stage.number == number for t in stage.members]


def joined(
    config: FamilyConfig,
    groups: Sequence[Unit],
    *,
    others: Sequence[Unit] = (),
    tasks: Sequence[Task] = (),
    decode: AnswerText | None = None,
) -> list[Unit]:
    """Return the families of recorded groups, each as the unit that the recorded run trained.

    Members that did not begin as their tasks ask for are left out, as the recorded run did.

    Args:
        config: settings of the recorded run.
        groups: units of a batch, in the order of the batch.
        others: units that were not trained, among them first groups and judgements of these families.
        tasks: tasks of the groups that have a note or a prefix.
        decode: turns the tokens of an answer into text, see `settle`.

    Raises:
        CannotRetrain: a family would train nothing, so it was trained with other settings.
    """
    children = {task.task_id: ChildTask(task.note, task.start, policy=task.policy) for task in tasks}
    first = {unit.group_id: FamilyStage(unit.group_id, "", unit.trajectories) for unit in (*others, *groups)}
    families: dict[str, list[Unit]] = {}
    for group in groups:
        families.setdefault(names.family_of(group.group_id), []).append(group)
    if isinstance(config, JudgeFamily | VerdictFamily):
        # Judgements value the answers, trained or not.
        for group in others:
            if names.stage_of(group.group_id) and (parts := families.get(names.family_of(group.group_id))):
                parts.append(group)
    units = []
    for family_id, parts in families.items():
        family = TaskFamily(family_id)
        for group in sorted(parts, key=lambda part: names.stage_of(part.group_id)):
            stage = FamilyStage(group.group_id, group.unit_id, group.trajectories)
            if names.stage_of(group.group_id) and family_id in first:
                stage = stage.checked(first[family_id], _asked(group, children))
            family.add_stage(stage)
        settled = settle(config, family, decode)
        if not settled.trained:
            raise CannotRetrain(
                f"family {family_id} was trained, and nothing of it would be now; its judgements are not in the "
                "recording, or the run had other settings of [learner.family]"
            )
        units.append(settled.unit(family))
    return units


def _asked(group: Unit, children: Mapping[str, ChildTask]) -> list[ChildTask]:
    """Return the tasks of a group by member; those without a note or a prefix are plain."""
    size = max((t.group_size for t in group.trajectories), default=0)
    return [children.get(names.task_id(group.group_id, member), ChildTask()) for member in range(size)]
