"""Contradictions in `[learner.family]` of kind "judge", each with the cure."""

from collections.abc import Iterator

from learner.config import LearnerConfig
from learner.credit.comparison_config import ComparedAdvantage
from learner.credit.needs import VALUES
from learner.credit.signal import judges_groups
from learner.families.family_config import JudgeFamily

WHAT = '[learner.family] of kind "judge"'


def judge_contradictions(learner: LearnerConfig, family: JudgeFamily) -> Iterator[str]:
    """Yield a line per mistake: field, value seen, cure."""
    advantage = learner.algorithm.advantage
    if family.answers >= learner.group_size:
        yield (
            f"learner.family.answers is {family.answers} but learner.group_size is {learner.group_size}, which counts "
            "judgements, too: there would be none; lower answers, or raise group_size"
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
    bound, longest = longest_context(learner)
    needed = (family.answers + 1) * learner.sampling.max_turn_tokens
    if longest <= needed:
        yield (
            f"learner.sampling.{bound} is {longest} with {WHAT}: {family.answers} answers of max_turn_tokens "
            f"{learner.sampling.max_turn_tokens} in the prompt leave no room for a judgement; raise it above {needed}, "
            "or lower answers or max_turn_tokens"
        )


def longest_context(learner: LearnerConfig) -> tuple[str, int]:
    """Return the setting that bounds the tokens of a prompt with its answer, and its value."""
    sampling = learner.sampling
    if sampling.max_context_tokens:
        return "max_context_tokens", sampling.max_context_tokens
    return "max_trajectory_tokens", sampling.max_trajectory_tokens
