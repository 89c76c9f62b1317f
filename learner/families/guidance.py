"""Solved examples of other tasks behind a prompt that nobody solved (XRPO's seeding, arXiv:2510.06672). Pure."""

import numpy as np

from learner.families.drafts import AnswerText
from learner.families.family import ChildTask, Settled, TaskFamily, prompt_of
from learner.families.family_config import EXAMPLES, GuidedFamily
from learner.families.hints import is_solved
from learner.families.transcripts import filled, own_lines, transcript
from learner.trajectory import Trajectory

UNGUIDED, EXAMPLE = "unguided", "example"
"""Outcomes of a first group that a group with examples replaced, and of answers to other tasks."""


def other_tasks(index: int, count: int, rng: np.random.Generator) -> list[int]:
    """Return the numbers of different tasks, drawn from those before a task and, at the beginning, some after it.

    Example:
        >>> sorted(other_tasks(1, 3, np.random.default_rng(0)))
        [0, 2, 3]
    """
    tasks = [each for each in range(max(index, count) + 1) if each != index]
    return [int(each) for each in rng.choice(tasks, count, replace=False)]


def similarity(a: Trajectory, b: Trajectory) -> float:
    """Return the share of the different prompt tokens of two trajectories that both have, 0 to 1."""
    ours, theirs = set(prompt_of(a).tolist()), set(prompt_of(b).tolist())
    return len(ours & theirs) / max(1, len(ours | theirs))


def next_guided(
    config: GuidedFamily, family: TaskFamily, group_size: int, decode: AnswerText, rng: np.random.Generator
) -> list[ChildTask]:
    """Return the tasks that look for examples, or those with examples; none if the family is to be trained.

    Args:
        config: kind of the family.
        family: its groups so far.
        group_size: members of a group.
        decode: turns tokens into text.
        rng: generator that depends on the seed of the run and on the family alone.
    """
    first = family.stages[0].members
    if len(family.stages) > 2 or not first or any(is_solved(config, t) for t in first):
        return []
    if len(family.stages) == 1:
        return [ChildTask(index=index) for index in other_tasks(family.index, config.candidates, rng)]
    plain = first[0]
    solved: dict[bytes, Trajectory] = {}
    for t in family.stages[1].members:
        if is_solved(config, t):
            # The environment may have few tasks, so that two numbers stand for one: an answer of each is kept.
            solved.setdefault(prompt_of(t).tobytes(), t)
    solved.pop(prompt_of(plain).tobytes(), None)
    if not solved:
        return []
    nearest = sorted(solved.values(), key=lambda t: -similarity(t, plain))[: config.examples]
    asked = decode(prompt_of(plain).tolist())
    texts = [
        f"{own_lines(decode(prompt_of(t).tolist()), asked).strip()}\n{transcript(t, decode)}" for t in nearest
    ]
    return [ChildTask(filled(config.note, {EXAMPLES: "\n\n".join(texts)}))] * group_size


def settle_guided(config: GuidedFamily, family: TaskFamily) -> Settled:
    """Return what is trained of a family with examples: the group behind them, or else the first group."""
    by_stage = {stage.number: stage.members for stage in family.stages}
    first, guided = by_stage.get(0, ()), by_stage.get(config.stages, ())
    return Settled(guided or first, {UNGUIDED: first if guided else (), EXAMPLE: by_stage.get(1, ())})
