"""Contradictions in `[learner]`: a method misses a required part, or the rules beside this file find a mistake.

There is one function per subject, and a file for a subject with many. Each yields a line per mistake, with field,
value seen and cure.
`launch.run_file.method_effect` has settings without effect.
"""

from collections.abc import Iterator

from launch.run_file.credit_rules import credit_contradictions
from launch.run_file.family_rules import family_contradictions
from launch.run_file.objectives import compares_members, objectives_of
from launch.run_file.ratio_rules import ratio_contradictions
from launch.run_file.replay_rules import replay_contradictions
from learner.comparisons import judges_groups
from learner.settings.advantages import GROUP_RELATIVE, GaeAdvantage
from learner.settings.algorithm import RegressionSurrogate
from learner.settings.learner import LearnerConfig


def method_contradictions(learner: LearnerConfig) -> Iterator[str]:
    """Yield the mistakes that the rules of this file and of those beside it find."""
    yield from _critic(learner)
    yield from _groups(learner)
    yield from replay_contradictions(learner)
    yield from ratio_contradictions(learner.algorithm)
    yield from _updates(learner)
    yield from credit_contradictions(learner)
    yield from family_contradictions(learner)


def _critic(learner: LearnerConfig) -> Iterator[str]:
    algorithm = learner.algorithm
    estimated = isinstance(algorithm.advantage, GaeAdvantage)
    if estimated and algorithm.critic is None:
        yield 'learner.algorithm.advantage.kind is "gae" but there is no critic; add [learner.algorithm.critic]'
    if algorithm.critic is not None and not estimated:
        yield (
            f'learner.algorithm.critic is set but learner.algorithm.advantage.kind is "{algorithm.advantage.kind}", '
            'which asks for no values; take the critic out or use kind "gae"'
        )
    for objective in objectives_of(algorithm):
        if isinstance(objective.surrogate, RegressionSurrogate) and not estimated:
            yield (
                f'{objective.name}.surrogate.kind is "regression", which adds up advantages of tokens, but '
                f'learner.algorithm.advantage.kind is "{algorithm.advantage.kind}"; use kind "gae", with a critic'
            )
    if learner.train_on == "windows" and not estimated:
        yield (
            f'learner.train_on is "windows" but learner.algorithm.advantage.kind is "{algorithm.advantage.kind}": '
            'an unfinished trajectory has no return yet; use kind "gae", with a critic'
        )


def _groups(learner: LearnerConfig) -> Iterator[str]:
    kind, algorithm = learner.algorithm.advantage.kind, learner.algorithm
    needs = compares_members(learner)
    if needs and learner.group_size == 1:
        yield f'learner.group_size is 1: an advantage of kind "{kind}" is always zero then; use at least 2'
    if (needs or kind == "greedy") and learner.train_on == "trajectories":
        yield (
            f'learner.train_on is "trajectories" but an advantage of kind "{kind}" needs the whole group; '
            'use train_on = "groups", or kind "gae" with a critic, or "batch_mean"'
        )
    for objective in objectives_of(algorithm):
        if objective.surrogate.kind == "bounded" and kind not in GROUP_RELATIVE:
            yield (
                f'{objective.name}.surrogate.kind is "bounded", which compares with the group\'s median, but '
                f'learner.algorithm.advantage.kind is "{kind}"; use one of {", ".join(GROUP_RELATIVE)}'
            )
    if algorithm.scale_by_informative and not judges_groups(algorithm.advantage):
        yield (
            f'learner.algorithm.scale_by_informative counts groups, but advantage.kind is "{kind}", not formed '
            f'within groups; take it out, or use one of {", ".join(GROUP_RELATIVE)}, or "compared" among the group'
        )


def _updates(learner: LearnerConfig) -> Iterator[str]:
    algorithm = learner.algorithm
    room, units = learner.batch_trajectories, "trajectories" if learner.train_on != "windows" else "windows"
    if learner.train_on == "groups":
        room, units = learner.batch_trajectories // learner.group_size, "groups"
    for objective in objectives_of(algorithm):
        name, updates = objective.name, objective.updates_per_batch
        if updates > max(1, room):
            yield f"{name}.updates_per_batch is {updates} but a batch has only {room} {units}; lower it"
