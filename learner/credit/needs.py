"""Names of rewards and marks that the settings rely on, with the field that names each."""

import difflib
from collections.abc import Iterator, Sequence

from learner.config import LearnerConfig
from learner.credit.comparison_config import ComparedAdvantage
from learner.credit.reward_config import FewestCalls, RewardConfig
from learner.credit.rewards.made import made_rewards
from learner.families.answer_config import JudgeFamily
from learner.families.family_config import GuidedFamily, HintFamily, RetryFamily
from learner.trajectory import Trajectory

VALUES = {"return", "return_to_go", "each"}
"""Values of a comparison that are no name of a reward."""


def needed_rewards(learner: LearnerConfig) -> Iterator[tuple[str, str]]:
    """Yield field and name of each reward that the environment has to give.

    Example:
        >>> list(needed_rewards(LearnerConfig(reward={"gates": [{"reward": "short", "needs": "right"}]})))
        [('learner.reward.gates.0.reward', 'short'), ('learner.reward.gates.0.needs', 'right')]
    """
    made = made_rewards(learner.reward)
    for field, name in _weighed(learner.reward):
        if name not in made:
            yield field, name
    reward, advantage = learner.reward, learner.algorithm.advantage
    for i, gate in enumerate(reward.gates):
        yield f"learner.reward.gates.{i}.needs", gate.needs
    if reward.flawed is not None:
        yield "learner.reward.flawed.reward", reward.flawed.reward
        yield "learner.reward.flawed.needs", reward.flawed.needs
    if reward.steps is not None:
        yield "learner.reward.steps.reward", reward.steps.reward
    if reward.wrong is not None:
        yield "learner.reward.wrong.reward", reward.wrong.reward
    if reward.group is not None and reward.group.reward != "return":
        yield "learner.reward.group.reward", reward.group.reward
    if learner.replay is not None and learner.replay.outcome != "return":
        yield "learner.replay.outcome", learner.replay.outcome
    if isinstance(learner.family, HintFamily | RetryFamily | GuidedFamily) and learner.family.reward:
        yield "learner.family.reward", learner.family.reward
    if isinstance(learner.family, JudgeFamily) and learner.family.reference != "return":
        yield "learner.family.reference", learner.family.reference
    if isinstance(advantage, ComparedAdvantage):
        for i, term in enumerate(advantage.terms):
            if term.value not in VALUES | made:
                yield f"learner.algorithm.advantage.terms.{i}.value", term.value
        for field, name in values_of_parts(advantage):
            if name not in made:
                yield field, name


def values_of_parts(advantage: ComparedAdvantage) -> Iterator[tuple[str, str]]:
    """Yield field and name of each reward that a part beside the terms of a comparison reads.

    Such a part reads the return, or one reward: "return_to_go" and "each" are values of terms alone.

    Example:
        >>> list(values_of_parts(ComparedAdvantage(amplify={"value": "right"}, novelty={})))
        [('learner.algorithm.advantage.amplify.value', 'right')]
    """
    parts = {
        "novelty": advantage.novelty,
        "by_difficulty": advantage.by_difficulty,
        "amplify": advantage.amplify,
    }
    for name, part in parts.items():
        if part is not None and part.value != "return":
            yield f"learner.algorithm.advantage.{name}.value", part.value


def _weighed(reward: RewardConfig) -> Iterator[tuple[str, str]]:
    """Yield field and name of each reward that has a weight or a gate; rewards that Offbeat makes may have them."""
    for name in reward.weights:
        yield f"learner.reward.weights.{name}", name
    for i, stage in enumerate(reward.stages):
        for name in stage.weights:
            yield f"learner.reward.stages.{i}.weights.{name}", name
    for i, gate in enumerate(reward.gates):
        yield f"learner.reward.gates.{i}.reward", gate.reward


def needed_marks(learner: LearnerConfig) -> Iterator[tuple[str, str]]:
    """Yield field and name of each mark that the environment has to give.

    Example:
        >>> calls = {"kind": "fewest_calls", "reward": "answer", "calls": "calls"}
        >>> list(needed_marks(LearnerConfig(reward={"group": calls})))
        [('learner.reward.group.calls', 'calls')]
    """
    group, advantage = learner.reward.group, learner.algorithm.advantage
    if isinstance(group, FewestCalls) and group.calls:
        yield "learner.reward.group.calls", group.calls
    if learner.reward.bonus is not None:
        yield "learner.reward.bonus.mark", learner.reward.bonus.mark
    if learner.replay is not None and learner.replay.only_with:
        yield "learner.replay.only_with", learner.replay.only_with
    if learner.reward.steps is not None:
        yield "learner.reward.steps.mark", learner.reward.steps.mark
    if learner.reward.coverage is not None:
        yield "learner.reward.coverage.mark", learner.reward.coverage.mark
    if isinstance(advantage, ComparedAdvantage):
        for i, term in enumerate(advantage.terms):
            if "anchor" in term.among:
                yield f"learner.algorithm.advantage.terms.{i}.among", "anchor"


def never_given(learner: LearnerConfig, arrived: Sequence[Trajectory]) -> Iterator[str]:
    """Yield a sentence for each reward and mark that the settings rely on and that none of the episodes has."""
    names = {name for trajectory in arrived for name in trajectory.reward_by_name}
    unknown = {place: name for place, name in needed_rewards(learner) if name not in names}
    for place, name in sorted(unknown.items()):
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        yield (
            f"{place}{'' if place.endswith(f'.{name}') else f' is {name!r}'}: none of the first {len(arrived)} "
            f"episodes has a reward of this name{f'; did you mean {near[0]!r}?' if near else ''} "
            f"(rewards: {', '.join(sorted(names))})"
        )
    marks = {mark.name for trajectory in arrived for mark in trajectory.marks}
    for place, name in needed_marks(learner):
        if name not in marks:
            yield (
                f"{place}: no turn of the first {len(arrived)} episodes has the mark {name!r}, which the "
                f"environment must give in StepResult.marks (marks: {', '.join(sorted(marks)) or 'none'})"
            )
