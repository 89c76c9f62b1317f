"""Contradictions in `[learner.family]`: what families cannot be combined with, and what they lack, with the cure."""

from collections.abc import Iterator

from envs.base import SuiteFacts
from launch.run_file.answer_rules import judge_contradictions, longest_context, refine_contradictions
from learner.comparisons import is_by_turn
from learner.settings.advantages import comparisons_of
from learner.settings.families import (
    ATTEMPT,
    REFLECTION,
    BranchFamily,
    DraftFamily,
    FamilyConfig,
    GuidedFamily,
    HintFamily,
    JudgeFamily,
    RefineFamily,
    RetryFamily,
)
from learner.settings.learner import LearnerConfig


def family_contradictions(learner: LearnerConfig) -> Iterator[str]:
    """Yield a line per mistake: field, value seen, cure."""
    family = learner.family
    yield from _shared_prefix(learner)
    if family is None:
        return
    yield from _beside(learner, family)
    if isinstance(family, BranchFamily | RetryFamily):
        yield from _parts_of_a_group(learner, family)
    if isinstance(family, BranchFamily) or (isinstance(family, RetryFamily) and family.begin != "prompt"):
        yield from _branches(learner, family)
    if isinstance(family, JudgeFamily):
        yield from judge_contradictions(learner, family)
    if isinstance(family, RefineFamily):
        yield from refine_contradictions(learner, family)
    yield from _room(learner)


def _beside(learner: LearnerConfig, family: FamilyConfig) -> Iterator[str]:
    """Yield the refusal of what no family, or none whose answers are compared together, can be combined with."""
    what = f'[learner.family] of kind "{family.kind}"'
    if learner.train_on != "groups":
        yield (
            f'learner.train_on is "{learner.train_on}" with {what}, which has to see a whole group before it asks for '
            'the next one; use train_on = "groups", or take [learner.family] out'
        )
    if learner.replay is not None:
        yield (
            f"learner.replay is set with {what}: the table would take answers to a prompt with a note for answers to "
            "the prompt; take one of the two out"
        )
    if learner.algorithm.advantage.kind == "greedy":
        yield (
            f'learner.algorithm.advantage.kind is "greedy" with {what}, whose groups have no greedy member; use kind '
            '"group", or take [learner.family] out'
        )
    if learner.reward.group is not None:
        yield (
            f"learner.reward.group is set with {what}: the reward would compare each group of the family by itself; "
            "take one of the two out"
        )
    merged = isinstance(family, BranchFamily | RetryFamily | RefineFamily) or (
        isinstance(family, HintFamily) and family.members > 0
    )
    if merged and (learner.reward.stages or learner.reward.bonus is not None):
        yield (
            f"learner.reward.{'stages' if learner.reward.stages else 'bonus'} is set with {what}, which compares "
            "answers of several policy versions with each other: those of one family would be valued by two rules; "
            "take one of the two out"
        )


def quoted_answers(family: FamilyConfig | None) -> int:
    """Return the least number of answers that stand in a prompt with a note.

    Example:
        >>> quoted_answers(GuidedFamily(examples=3)), quoted_answers(RetryFamily(begin="parting", note="", rollouts=2))
        (3, 0)
    """
    match family:
        case DraftFamily() | RefineFamily():
            return 1
        case RetryFamily():
            return max(family.reflection.count(ATTEMPT), sum(map(family.note.count, (ATTEMPT, REFLECTION))))
        case GuidedFamily():
            return family.examples
        case JudgeFamily():
            return family.answers
    return 0


def _room(learner: LearnerConfig) -> Iterator[str]:
    """Yield the refusal of a note that would leave no room for an answer."""
    family, sampling = learner.family, learner.sampling
    answers = quoted_answers(family)
    match family:
        case DraftFamily():
            what = "a draft"
        case RetryFamily():
            what = "a reflection" if family.reflection else "an earlier answer"
        case GuidedFamily():
            what = "an example" if answers == 1 else f"{answers} examples"
        case RefineFamily():
            what = "an earlier answer"
        case _:
            return
    if not answers:
        return
    bound, longest = longest_context(learner)
    needed = (answers + 1) * sampling.max_turn_tokens
    if longest <= needed:
        yield (
            f'learner.sampling.{bound} is {longest} with [learner.family] of kind "{family.kind}": {what} of '
            f"max_turn_tokens {sampling.max_turn_tokens} in the prompt leaves no room for as long an answer; raise it "
            f"above {needed}, or lower max_turn_tokens"
        )


def _parts_of_a_group(learner: LearnerConfig, family: BranchFamily | RetryFamily) -> Iterator[str]:
    """Yield the refusal of a group that is all first episodes."""
    if family.rollouts >= learner.group_size:
        others = "branches" if isinstance(family, BranchFamily) else "retries"
        yield (
            f"learner.family.rollouts is {family.rollouts} but learner.group_size is {learner.group_size}, which "
            f"counts {others}, too: there would be none; lower rollouts, or raise group_size"
        )


def _branches(learner: LearnerConfig, family: BranchFamily | RetryFamily) -> Iterator[str]:
    """Yield what episodes that begin in the middle of others cannot be combined with."""
    reward, algorithm = learner.reward, learner.algorithm
    what, one = f'[learner.family] of kind "{family.kind}"', "branch" if family.kind == "branch" else "retry"
    counted = {
        "wrong": reward.wrong is not None and reward.wrong.per_turn > 0,
        "steps": reward.steps is not None,
        "coverage": reward.coverage is not None,
        "length": reward.length is not None,
    }
    for name in (name for name, counts in counted.items() if counts):
        yield (
            f"learner.reward.{name} is set with {what}: it counts turns, marks or tokens, and those before a {one} "
            f"begins are not the {one}'s; take one of the two out"
        )
    compared = comparisons_of(algorithm.advantage)
    if algorithm.advantage.kind == "gae" or (compared is not None and is_by_turn(compared)):
        yield (
            f'learner.algorithm.advantage.kind is "{algorithm.advantage.kind}" with {what}: a {one}\'s first turn '
            "would be credited with rewards of the turns before it; use an advantage of whole trajectories, such as "
            'kind "group"'
        )


def _shared_prefix(learner: LearnerConfig) -> Iterator[str]:
    shared, advantage = learner.algorithm.shared_prefix, learner.algorithm.advantage
    if shared == "own":
        return
    if not isinstance(learner.family, BranchFamily):
        yield (
            f'learner.algorithm.shared_prefix is "{shared}" but no trajectory begins with tokens of another; add '
            '[learner.family] of kind "branch", or use "own"'
        )
    compared = comparisons_of(advantage)
    if advantage.kind == "risk" or (compared is not None and compared.whiten == "tokens"):
        yield (
            f'learner.algorithm.shared_prefix is "{shared}" but learner.algorithm.advantage of kind '
            f'"{advantage.kind}" is made for a whole batch, which it does not act on; use kind "group", or "own"'
        )
    if shared == "sum" and learner.algorithm.aggregation == "sequence_mean":
        yield (
            'learner.algorithm.shared_prefix is "sum" but learner.algorithm.aggregation is "sequence_mean", which '
            "weighs a token by the length of its own trajectory, so the sum is not that over copies; use aggregation "
            '"token_mean", or shared_prefix "mean"'
        )


def family_notes(learner: LearnerConfig) -> Iterator[str]:
    """Yield a line if the lag bound lets fewer families be under way than two batches need."""
    family = learner.family
    if family is not None and learner.lag_bound < 2 * family.stages + 1:
        yield (
            f"learner.max_policy_lag is {learner.lag_bound} with families of up to {family.stages + 1} groups in a "
            "row: less than two batches are under way, so the learner waits for every batch; raise it to "
            f"{2 * family.stages + 1} if it should not"
        )


def lacking(learner: LearnerConfig, facts: SuiteFacts) -> Iterator[str]:
    """Yield the refusal of a family that needs what the environment is known not to give."""
    family = learner.family
    if family is None:
        return
    if facts.own_prompts:
        yield (
            f'learner.family.kind is "{family.kind}", which needs a prompt of one growing conversation, but the '
            "environment writes every prompt itself; take [learner.family] out"
        )
    if isinstance(family, HintFamily) and facts.hints is False:
        yield (
            'learner.family.kind is "hint" but the environment gives no hints; add StepResult.hints '
            "(docs/extend/environments.md), which the suite rows does with env.params.hint = COLUMN and reasoning_gym "
            "with env.params.hints = true, or take [learner.family] out"
        )
