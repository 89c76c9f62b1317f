"""Hints to tasks that no member of a group solved (GHPO, arXiv:2507.10628; Scaf-GRPO, arXiv:2510.19807). Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace

from learner.families.family import ChildTask, Settled, TaskFamily
from learner.families.family_config import HINT, GuidedFamily, HintFamily, RetryFamily
from learner.trajectory import Trajectory
from protocol.messages.fields import MAX_TEXT

UNHINTED, REPLACED = "unhinted", "replaced"
"""Outcomes of members of groups that a stronger hint replaced, and of a wrong answer that a right one replaced."""


def hint_levels(hints: Sequence[str], shares: Sequence[float]) -> list[str]:
    """Return the hints in rising strength: a share of the characters of one text, or of a list of texts.

    A hint that is empty, or that is the one before it, is left out. With one text of n characters, the hint of share w
    is its first round(w n) characters (GHPO, arXiv:2507.10628). With n texts it is the first ceil(w n) of them, each on
    a line of its own, so that hints accumulate (Scaf-GRPO, arXiv:2510.19807).

    Example:
        >>> hint_levels(["17 + 25 = 42"], [0.25, 0.5, 1.0])
        ['17 ', '17 + 2', '17 + 25 = 42']
        >>> hint_levels(["carry the 1", "it is 42"], [0.5, 0.75])
        ['carry the 1', 'carry the 1\\nit is 42']
    """
    levels: list[str] = []
    for share in shares:
        if len(hints) == 1:
            level = hints[0][: round(share * len(hints[0]))]
        else:
            level = "\n".join(hints[: math.ceil(share * len(hints))])
        if level and level not in levels:
            levels.append(level)
    return levels


def is_solved(config: HintFamily | RetryFamily | GuidedFamily, t: Trajectory) -> bool:
    """Return whether a trajectory is right, by the rewards that the environment gave."""
    if config.reward:
        return t.reward_by_name.get(config.reward, 0.0) > config.above
    return t.return_ > config.above if t.correct is None else t.correct


def next_hint(config: HintFamily, family: TaskFamily, group_size: int) -> list[ChildTask]:
    """Return the tasks with the next hint; none if the family is to be trained.

    There is no next hint if a member of the newest group is right, if the strongest one was given, or if the group was
    one of the first `warmup_groups`. The reaction depends on the delivered members alone, so it is the same after a
    restart.
    """
    if family.index < config.warmup_groups or any(is_solved(config, t) for t in family.stages[-1].members):
        return []
    levels = hint_levels(family.hints, config.shares) if family.stages[0].members else []
    given = len(family.stages) - 1
    if given >= len(levels):
        return []
    note = config.note.replace(HINT, levels[given])[:MAX_TEXT]
    return [ChildTask(note)] * (config.members or group_size)


def settle_hints(config: HintFamily, family: TaskFamily) -> Settled:
    """Return what is trained of a family with hints.

    Without `members` it is the newest group that has any member (GHPO). Otherwise it is the first group, in which the
    first right answer to a hint takes the place of the last member (Scaf-GRPO).
    """
    first, *hinted = family.stages
    if not config.members:
        last = next((stage for stage in reversed(family.stages) if stage.members), first)
        return Settled(
            last.members,
            {UNHINTED: [t for stage in family.stages if stage is not last for t in stage.members]},
        )
    newest = [t for stage in hinted for t in stage.members]
    right = next((t for t in newest if is_solved(config, t)), None)
    if first.number or right is None or not first.members:
        return Settled(first.members, {UNHINTED: newest})
    return Settled(
        [*first.members[:-1], replace(right, group_id=first.group_id)],
        {REPLACED: [first.members[-1]], UNHINTED: [t for t in newest if t is not right]},
    )
