"""Contradictions in `[learner.family]` of kinds "judge" and "refine", each with the cure."""

from collections.abc import Iterator

from learner.comparisons import is_by_turn, judges_groups
from learner.rewards import VALUES, values_of_parts
from learner.settings.advantages import ComparedAdvantage, comparisons_of
from learner.settings.families import JudgeFamily, RefineFamily
from learner.settings.learner import LearnerConfig

WHAT = '[learner.family] of kind "judge"'


def judge_contradictions(learner: LearnerConfig, family: JudgeFamily) -> Iterator[str]:
    """Yield a line per mistake: field, value seen, cure."""
    advantage = learner.algorithm.advantage
    if family.answers >= learner.group_size:
        yield (
            f"learner.family.answers is {family.answers} but learner.group_size is {learner.group_size}, which counts "
            "judgements, too: there would be none; lower answers, or raise group_size"
        )
    elif family.answers == learner.group_size - 1:
        yield (
            f"learner.family.answers is {family.answers} but learner.group_size is {learner.group_size}, which counts "
            "judgements, too: a lone one is compared with nobody, so that it never trains; lower answers, or raise "
            "group_size"
        )
    if not judges_groups(advantage):
        yield (
            f'learner.algorithm.advantage.kind is "{advantage.kind}" with {WHAT}, whose answers must not be compared '
            'with judgements; use an advantage within groups, such as kind "group"'
        )
    if isinstance(advantage, ComparedAdvantage):
        named = [term.value for term in advantage.terms if term.value not in VALUES]
        if named:
            yield (
                f'learner.algorithm.advantage.terms compare the reward "{named[0]}" with {WHAT}, whose judgements have '
                'the reward "agreement" alone; use value = "return"'
            )
        for field, name in values_of_parts(advantage):
            yield (
                f'{field} is "{name}" with {WHAT}, whose judgements have the reward "agreement" alone; use value = '
                '"return"'
            )
    bound, longest = longest_context(learner)
    needed = (family.answers + 1) * learner.sampling.max_turn_tokens
    if longest <= needed:
        yield (
            f"learner.sampling.{bound} is {longest} with {WHAT}: {family.answers} answers of max_turn_tokens "
            f"{learner.sampling.max_turn_tokens} in the prompt leave no room for a judgement; raise it above {needed}, "
            "or lower answers or max_turn_tokens"
        )


def refine_contradictions(learner: LearnerConfig, family: RefineFamily) -> Iterator[str]:
    """Yield a line per mistake: field, value seen, cure."""
    advantage = learner.algorithm.advantage
    if family.rollouts >= learner.group_size:
        yield (
            f"learner.family.rollouts is {family.rollouts} but learner.group_size is {learner.group_size}, which "
            "counts refined episodes, too: there would be none; lower rollouts, or raise group_size"
        )
    elif family.rollouts == learner.group_size - 1:
        yield (
            f"learner.family.rollouts is {family.rollouts} but learner.group_size is {learner.group_size}, which "
            "counts refined episodes, too: a lone one never beats the mean of its own half, so that it never trains; "
            "lower rollouts, or raise group_size"
        )
    compared = comparisons_of(advantage)
    of_tokens = compared is not None and (is_by_turn(compared) or compared.whiten == "tokens")
    if not judges_groups(advantage) or of_tokens:
        yield (
            f'learner.algorithm.advantage.kind is "{advantage.kind}" with [learner.family] of kind "refine", whose '
            "refined episodes have an advantage of their own; use an advantage of whole trajectories within groups, "
            'such as kind "group"'
        )
    elif compared is not None and compared.whiten == "trajectories":
        yield (
            f'learner.algorithm.advantage.whiten is "{compared.whiten}" with [learner.family] of kind "refine": the '
            'returns of refined episodes would be in the deviation of plain ones; use whiten = "none"'
        )
    if compared is not None and compared.by_difficulty is not None:
        yield (
            'learner.algorithm.advantage.by_difficulty is set with [learner.family] of kind "refine": the returns of '
            "refined episodes would be in the weights of plain ones; take one of the two out"
        )


def longest_context(learner: LearnerConfig) -> tuple[str, int]:
    """Return the setting that bounds the tokens of a prompt with its answer, and its value."""
    sampling = learner.sampling
    if sampling.max_context_tokens:
        return "max_context_tokens", sampling.max_context_tokens
    return "max_trajectory_tokens", sampling.max_trajectory_tokens
