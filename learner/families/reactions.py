"""What a family does next: it asks for further tasks, or it is trained. Pure."""

from collections.abc import Sequence
from typing import assert_never

from learner.families.drafts import AnswerText, next_after_drafts, settle_drafts
from learner.families.family import ChildTask, Settled, TaskFamily
from learner.families.family_config import DraftFamily, FamilyConfig, HintFamily
from learner.families.hints import next_hint, settle_hints


def react(
    config: FamilyConfig, family: TaskFamily, *, group_size: int, decode: AnswerText
) -> Sequence[ChildTask]:
    """Return the tasks of the family's next group; none if the family is to be trained.

    A reaction depends on the delivered members and the settings alone, never on a clock, a version or a count. So a
    learner that is restarted asks for the same tasks again, and the broker ignores those that it has seen.

    Args:
        config: kind of the family.
        family: its groups so far, at least one.
        group_size: members of a group that is trained.
        decode: turns the tokens of an answer into text.
    """
    match config:
        case HintFamily():
            return next_hint(config, family, group_size)
        case DraftFamily():
            return next_after_drafts(config, family, group_size, decode)
        case _:
            assert_never(config)


def settle(config: FamilyConfig, family: TaskFamily) -> Settled:
    """Return what is trained of a family, and why the rest is not. Each member is in one of the two."""
    match config:
        case HintFamily():
            return settle_hints(config, family)
        case DraftFamily():
            return settle_drafts(family)
        case _:
            assert_never(config)
