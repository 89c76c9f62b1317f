"""Families in which somebody shows the policy how it is done: behind the prompt, or in its place. Pure.

Steered answers are ICPO's (arXiv:2510.26519): sampled behind a demonstration, and trained behind the plain prompt.
Taught ones are AMPO's (arXiv:2510.02227): written by teachers to tasks that nobody solved.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from learner.families.branching import behind_prompt
from learner.families.family import ChildTask, Settled, TaskFamily, prompt_of
from learner.families.notes import AnswerText, example_text, filled, is_solved
from learner.rewards import last_turn, with_rewards
from learner.settings.families import EXAMPLES, SteeredFamily, TaughtFamily
from learner.trajectory import UNTAUGHT, Trajectory
from protocol.messages.episodes import Reward

UNSTEERED = "unsteered"
"""Outcome of answers behind a demonstration that are wrong."""
STEERED = "steered"
"""Name of the reward that a right answer behind a demonstration gets."""


def next_steered(
    config: SteeredFamily,
    family: TaskFamily,
    demonstrations: Sequence[Trajectory],
    decode: AnswerText,
    rng: np.random.Generator,
) -> list[ChildTask]:
    """Return the tasks with a demonstration; none if the family is to be trained, or if nothing can be shown.

    A solution of the same task is no demonstration, unless `own` asks for it.

    Args:
        config: kind of the family.
        family: its groups so far.
        demonstrations: solved tasks.
        decode: turns tokens into text.
        rng: generator that depends on the seed of the run and on the family alone.
    """
    first = family.stages[0].members
    if len(family.stages) > 1 or not first:
        return []
    if config.own:
        solution = "\n".join(family.hints)
        return [ChildTask(filled(config.note, {EXAMPLES: solution}))] * config.members if solution else []
    plain = prompt_of(first[0])
    others = [t for t in demonstrations if not np.array_equal(prompt_of(t), plain)]
    if not others:
        return []
    asked, tasks = decode(plain.tolist()), []
    for _ in range(config.members):
        shown = rng.choice(len(others), min(config.examples, len(others)), replace=False)
        texts = [example_text(others[int(n)], asked, decode) for n in shown]
        tasks.append(ChildTask(filled(config.note, {EXAMPLES: "\n\n".join(texts)})))
    return tasks


def steering_bonus(config: SteeredFamily, version: int) -> float:
    r"""Return the bonus of a right answer that a policy version sampled behind a demonstration.

    .. math:: b \max(0, 1 - v / T)

    ICPO, arXiv:2510.26519, which counts training steps in place of versions.

    Example:
        >>> [steering_bonus(SteeredFamily(bonus=1.0, until_version=400), v) for v in (0, 100, 400, 900)]
        [1.0, 0.75, 0.0, 0.0]
    """
    return config.bonus * max(0.0, 1 - version / config.until_version)


def settle_steered(config: SteeredFamily, family: TaskFamily) -> Settled:
    """Return what is trained: plain answers, and right steered ones behind the plain prompt, as one group."""
    first = family.stages[0].members
    steered = [t for stage in family.stages[1:] for t in stage.members]
    right = [t for t in steered if first and is_solved(config, t)]
    kept = {id(t) for t in right}
    guided = [_with_bonus(config, behind_prompt(t, prompt_of(first[0]))) for t in right]
    trained = [replace(t, group_id=family.family_id) for t in (*first, *guided)]
    return Settled(trained, {UNSTEERED: [t for t in steered if id(t) not in kept]})


def _with_bonus(config: SteeredFamily, t: Trajectory) -> Trajectory:
    # The version that sampled the answer counts, so that a restart and `offbeat retrain` give the same bonus.
    bonus = steering_bonus(config, int(t.policy_version[t.action_mask].max(initial=0)))
    return with_rewards(t, [*t.rewards, Reward(STEERED, last_turn(t), bonus)])


TAUGHT = "taught"
"""Name of the reward that lifts a right answer of a teacher to its least return."""


def next_taught(config: TaughtFamily, family: TaskFamily) -> list[ChildTask]:
    """Return a task for each teacher if nobody solved the first group; else none."""
    first = family.stages[0].members
    if len(family.stages) > 1 or not first or any(is_solved(config, t) for t in first):
        return []
    return [ChildTask(policy=name) for name in config.teachers]


def settle_taught(config: TaughtFamily, family: TaskFamily) -> Settled:
    """Return the group with all right answers of teachers behind it. `learner.given.TaughtMembers` chooses among them.

    So the choice is made by the policy that is about to be updated, not by the one when the last answer came.
    """
    first = list(family.stages[0].members)
    written = [t for stage in family.stages[1:] for t in stage.members]
    right = [t for t in written if first and is_solved(config, t)]
    kept = {id(t) for t in right}
    taught = [
        replace(t, group_id=family.family_id, group_size=first[0].group_size, rewards=_lifted(config, t))
        for t in right
    ]
    return Settled([*first, *taught], {UNTAUGHT: [t for t in written if id(t) not in kept]})


def _lifted(config: TaughtFamily, t: Trajectory) -> list[Reward]:
    lacking = config.value - t.return_
    return [*t.rewards, Reward(TAUGHT, last_turn(t), lacking)] if lacking > 0 else list(t.rewards)
