"""Branches: further episodes that begin in the middle of a sampled one (ARPO, arXiv:2507.19849). Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from learner.families.family import ChildTask, Settled, TaskFamily
from learner.families.family_config import BranchFamily
from learner.trajectory import Trajectory
from protocol.messages.episodes import TaskStart
from protocol.messages.fields import MAX_PREFIX_BYTES


def surprisal(t: Trajectory, turn: int, tokens: int) -> float:
    """Return the mean of -log p over the first tokens of an action turn, in nats.

    Its expectation is their mean entropy, so it needs no more than the log-probabilities that were recorded.
    """
    at = next(each for each in t.turns if each.index == turn)
    return float(-t.logp_behaviour[at.start : min(at.end, at.start + tokens)].mean())


def branch_probability(change: float, weight: float) -> float:
    """Return the probability of a branch: clip(1/2 + w dH, 0, 1) for a change dH of the uncertainty.

    ARPO's program draws u uniformly and branches if clip(u - w dH, 0, 1) <= 1/2, which is the same.

    Example:
        >>> branch_probability(0.0, 0.2), branch_probability(1.0, 0.2), branch_probability(-9.0, 0.2)
        (0.5, 0.7, 0.0)
    """
    return min(1.0, max(0.0, 0.5 + weight * change))


def branch_turns(t: Trajectory) -> list[int]:
    """Return the action turns before which a branch may begin: all but the first, each behind an observation."""
    if any(turn.back != 1 for turn in t.turns) or not _alternates(t):
        return []
    return [turn.index for turn in t.turns if turn.action][1:]


def chosen(
    config: BranchFamily, parents: Sequence[Trajectory], rng: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """Yield member and turn of each branch: turn by turn, and within a turn in the order of the members."""
    turns = [branch_turns(t) for t in parents]
    for round_ in range(max(map(len, turns), default=0)):
        for member, t in enumerate(parents):
            if round_ >= len(turns[member]):
                continue
            turn, change = turns[member][round_], 0.0
            if config.where == "uncertain":
                first = next(each.index for each in t.turns if each.action)
                change = surprisal(t, turn, config.tokens) - surprisal(t, first, config.tokens)
            if rng.random() < branch_probability(change, config.weight):
                yield member, turn


def next_branches(
    config: BranchFamily, family: TaskFamily, *, group_size: int, room: int, rng: np.random.Generator
) -> list[ChildTask]:
    """Return the branches of a family's first group, and whole episodes for what is left of the budget.

    Args:
        group_size: whole episodes and branches together.
        room: tokens that a trajectory may have.
        rng: generator that depends on the seed of the run and on the family alone.
    """
    parents, budget = family.stages[0].members, group_size - config.rollouts
    if len(family.stages) > 1 or not parents:
        return []
    children = []
    for member, turn in chosen(config, parents, rng):
        start = prefix_of(parents[member], turn)
        if len(start.token_ids) <= min(MAX_PREFIX_BYTES, 4 * (room - 1)):
            children.append(ChildTask(start=start))
        if len(children) == budget:
            return children
    return [*children, *[ChildTask()] * (budget - len(children))]


def prefix_of(t: Trajectory, turn: int) -> TaskStart:
    """Return the beginning of a trajectory, up to the first token of an action turn."""
    end = next(each.start for each in t.turns if each.index == turn)
    return TaskStart(
        token_ids=t.token_ids[:end].astype("<i4").tobytes(),
        turns=[each for each in t.turns if each.index < turn],
        parent=t.trajectory_id,
    )


def settle_branches(family: TaskFamily) -> Settled:
    """Return what is trained of a family with branches: everything, as members of one group."""
    members = [t for stage in family.stages for t in stage.members]
    return Settled([replace(t, group_id=family.family_id) for t in members], {})


def shared_prefix_advantages(
    trajectories: Sequence[Trajectory], advantages: NDArray[np.float64], *, shared: str
) -> NDArray[np.float64]:
    r"""Return the advantage of each token, [ΣT], where branches share the beginnings of other trajectories.

    .. math:: A'_t = \frac{1}{|S_t|} \sum_{i \in S_t} A_i \quad\text{("mean")}, \qquad \sum_{i \in S_t} A_i
        \quad\text{("sum")}

    S_t are the trajectory that has sampled the token and all whose prefix holds it. The two are the hard and the soft
    form of ARPO (arXiv:2507.19849). The sum has the gradient of training each copy of the prefix.

    Args:
        trajectories: whole groups, [S]. The prefix of a branch is what it has before its first action token, and
            belongs to its `parent`. If the parent is not there, nobody trains the prefix.
        advantages: of each trajectory, [S].
        shared: "mean" or "sum".
    """
    rows = [np.full(len(t), a, dtype=np.float64) for t, a in zip(trajectories, advantages, strict=True)]
    counts = [np.ones(len(t)) for t in trajectories]
    places = {t.trajectory_id: i for i, t in enumerate(trajectories)}
    for t, advantage in zip(trajectories, advantages, strict=True):
        if (owner := places.get(t.parent)) is not None:
            rows[owner][: t.prompt_tokens] += advantage
            counts[owner][: t.prompt_tokens] += 1
    if shared == "mean":
        rows = [row / count for row, count in zip(rows, counts, strict=True)]
    return np.concatenate([np.zeros(0), *rows])


def _alternates(t: Trajectory) -> bool:
    return all(turn.index == n and turn.action == bool(n % 2) for n, turn in enumerate(t.turns))
