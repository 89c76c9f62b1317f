"""What a family does next: it asks for further tasks, or it is trained. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from learner.families.answer_config import JudgeFamily, RefineFamily
from learner.families.branching import next_branches, settle_branches
from learner.families.drafts import AnswerText, next_after_drafts, settle_drafts
from learner.families.family import ChildTask, Settled, TaskFamily
from learner.families.family_config import (
    BranchFamily,
    DraftFamily,
    FamilyConfig,
    GuidedFamily,
    HintFamily,
    RetryFamily,
)
from learner.families.guidance import next_guided, settle_guided
from learner.families.hints import next_hint, settle_hints
from learner.families.judging import next_judgements, settle_judgements
from learner.families.refining import next_refined, settle_refined
from learner.families.retries import next_retries, settle_retries


@dataclass(frozen=True)
class Surroundings:
    """What a reaction may know beside the family: settings of the run that do not change."""

    group_size: int
    """Members of a group that is trained."""
    decode: AnswerText
    """Turns the tokens of an answer into text."""
    room: int = 0
    """Most tokens of a trajectory."""
    seed: int = 0
    """Seed of the run."""


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
        case _:
            assert_never(config)


def settle(config: FamilyConfig, family: TaskFamily, decode: AnswerText | None = None) -> Settled:
    """Return what is trained of a family, and why the rest is not. Each member is in one of the two.

    Args:
        config: kind of the family.
        family: all its groups.
        decode: turns the tokens of an answer into text; a family of kind "judge" needs it.
    """
    match config:
        case HintFamily():
            return settle_hints(config, family)
        case DraftFamily():
            return settle_drafts(family)
        case JudgeFamily():
            assert decode is not None, "judgements are read"
            return settle_judgements(config, family, decode)
        case RefineFamily():
            return settle_refined(family)
        case BranchFamily():
            return settle_branches(family)
        case RetryFamily():
            return settle_retries(config, family)
        case GuidedFamily():
            return settle_guided(config, family)
        case _:
            assert_never(config)
