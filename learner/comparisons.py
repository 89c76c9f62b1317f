"""Advantages that are sums of comparisons, and groups that would train nothing. No torch.

A *unit* is what has a value: a trajectory, or an action turn of one. Only whole rollout groups are compared. Keys of
units begin with the group id, so that equal anchors of two groups never meet.
"""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.algorithms.advantages import (
    STD_EPSILON,
    UNIFORM_SPREAD,
    compare,
    has_peers,
    informative_scale,
    spread,
    turn_returns,
    uniform,
    whiten,
)
from learner.settings.advantages import (
    AdvantageConfig,
    Amplify,
    ByDifficulty,
    ComparedAdvantage,
    Comparison,
    Novelty,
    is_by_turn,
)
from learner.trajectory import Trajectory, turns_before
from protocol.arrays import Float64s


class TermParts(NamedTuple):
    """Result of one term, spread over the places of a batch, [P] each."""

    advantage: Float64s
    """Result of the comparison, without the term's weight; only centred if the weight is "spread"."""
    weight: Float64s
    """Weight of the term, or its deviation if the weight is "spread"."""
    compared: Float64s
    """1 where the unit has somebody to be compared with, else 0."""


def compared_advantages(config: ComparedAdvantage, trajectories: Sequence[Trajectory]) -> Float64s:
    """Compute the sum of comparisons.

    Args:
        config: the terms.
        trajectories: members of all rollout groups of the batch, in any order.

    Returns:
        Advantages by trajectory [S]; by token [ΣT] if a term is of turns, or if tokens are whitened.

    Raises:
        ValueError: a value is not finite.
    """
    by_token = is_by_turn(config)
    terms = _with_names(config.terms, trajectories)
    parts = [_parts(term, trajectories, by_token) for term in terms]
    total = _mean(parts) if config.combine == "mean" else _sum(terms, parts)
    lengths = [len(t) for t in trajectories]
    if config.novelty is not None:
        total = total + _novelty(config.novelty, trajectories, total)
    if config.amplify is not None:
        total = _amplified(config.amplify, trajectories, total)
    if config.by_difficulty is not None:
        owners = (
            np.repeat(np.arange(len(trajectories)), lengths) if by_token else np.arange(len(trajectories))
        )
        total = total * _difficulty_weights(config.by_difficulty, trajectories, total, owners)[owners]
    if config.whiten == "trajectories":
        return compare(total, [""] * len(total), scale="sample_std")
    if config.whiten == "tokens":
        spread_out = total if by_token else np.repeat(total, lengths)
        return whiten(spread_out, np.concatenate([t.learned_mask for t in trajectories]))
    return total


def term_values(term: Comparison, trajectories: Sequence[Trajectory]) -> Float64s:
    """Return the value of each unit of a term, [M], in the order of trajectories and turns."""
    if term.of == "trajectory":
        return np.array([_trajectory_value(term.value, t) for t in trajectories])
    rows = [_turn_values(term, t) for t in trajectories]
    return np.concatenate([np.zeros(0), *rows])


def term_keys(term: Comparison, trajectories: Sequence[Trajectory]) -> list[Hashable]:
    """Return the key of each unit of a term, length M. Units with equal keys are compared."""
    if "batch" in term.among:
        return [()] * sum(1 if term.of == "trajectory" else t.action_turns for t in trajectories)
    if term.of == "trajectory":
        return [t.group_id for t in trajectories]
    keys: list[Hashable] = []
    for t in trajectories:
        histories = anchor_histories(t, term.history) if "anchor" in term.among else {}
        for j, turn in enumerate(t.action_turn_indices):
            key: tuple[Hashable, ...] = (t.group_id,)
            if "position" in term.among:
                key += (j,)
            if "anchor" in term.among:
                states = histories[turn]
                # A turn whose state is unknown is like no other.
                key += tuple(states) if None not in states else (t.trajectory_id, j, None)
            keys.append(key)
    return keys


def anchor_histories(t: Trajectory, history: int) -> dict[int, tuple[str | float | None, ...]]:
    """Return by action turn the anchors of the last `history` action turns of its branch, and its own as the last.

    Turns of other branches are left out, because the policy did not see them. An unknown anchor is None.
    """
    known, before, own = t.anchors, turns_before(t.turns), set(t.action_turn_indices)
    histories: dict[int | None, tuple[str | float | None, ...]] = {None: ()}
    for turn in t.turns:
        earlier = histories[before[turn.index]]
        acts = turn.index in own
        histories[turn.index] = (*earlier, known.get(turn.index))[-history - 1 :] if acts else earlier
    return {index: histories[index] for index in own}


def _with_names(terms: Sequence[Comparison], trajectories: Sequence[Trajectory]) -> list[Comparison]:
    """Replace a term of the value "each" by one for every reward; the return stands for none at all."""
    names = sorted({reward.name for t in trajectories for reward in t.rewards}) or ["return"]
    return [
        named
        for term in terms
        for named in (
            [term.model_copy(update={"value": name}) for name in names] if term.value == "each" else [term]
        )
    ]


def _parts(term: Comparison, trajectories: Sequence[Trajectory], by_token: bool) -> TermParts:
    values, keys = term_values(term, trajectories), term_keys(term, trajectories)
    weights = np.full(len(values), 1.0 if term.weight == "spread" else term.weight)
    if not term.among:
        parts = TermParts(values, weights, np.ones(len(values)))
    elif term.weight == "spread":
        centred, deviations = compare(values, keys, scale="none"), spread(values, keys, scale=term.scale)
        parts = TermParts(centred, deviations, has_peers(keys).astype(np.float64))
    else:
        parts = TermParts(
            compare(values, keys, scale=term.scale), weights, has_peers(keys).astype(np.float64)
        )
    if not by_token:
        return parts
    place = _spread_turns if term.of == "turn" else _spread_trajectories
    return TermParts(*(place(column, trajectories) for column in parts))


def _sum(terms: Sequence[Comparison], parts: Sequence[TermParts]) -> Float64s:
    """Add up the terms; those weighed by their spread are added first, and divided by all of it."""
    sums = [
        part.advantage * part.weight
        for term, part in zip(terms, parts, strict=True)
        if term.weight != "spread"
    ]
    by_spread = [part for term, part in zip(terms, parts, strict=True) if term.weight == "spread"]
    if by_spread:
        deviations = np.add.reduce([part.weight for part in by_spread])
        sums.append(np.add.reduce([part.advantage for part in by_spread]) / (deviations + STD_EPSILON))
    total = sums[0]
    for more in sums[1:]:
        total = total + more
    return total


def _mean(parts: Sequence[TermParts]) -> Float64s:
    weights = [part.weight * part.compared for part in parts]
    total = np.add.reduce([part.advantage * weight for part, weight in zip(parts, weights, strict=True)])
    divisor = np.add.reduce(weights)
    mean: Float64s = np.divide(total, divisor, out=np.zeros_like(total), where=divisor > 0)
    return mean


def _novelty(config: Novelty, trajectories: Sequence[Trajectory], advantages: Float64s) -> Float64s:
    """Return the bonus of each trajectory, [S]; 0 where the answer is wrong or its advantage not above 0."""
    likely = np.array([_mean_logp(t) for t in trajectories])
    right = np.array(
        [t.correct is not False and _trajectory_value(config.value, t) > 0 for t in trajectories]
    )
    relative = compare(likely, [t.group_id for t in trajectories], scale="none")
    bonus = (config.scale * (1 - np.exp(relative))).clip(0.0, config.most * advantages.clip(min=0.0))
    return np.where(right, bonus, 0.0)


def _amplified(config: Amplify, trajectories: Sequence[Trajectory], advantages: Float64s) -> Float64s:
    values = np.array([_trajectory_value(config.value, t) for t in trajectories])
    better = np.where(advantages >= 0, config.factor * advantages, advantages)
    return np.where(values >= config.perfect, 1.0, better)


def _mean_logp(t: Trajectory) -> float:
    mask = t.learned_mask
    return float(t.logp_behaviour[mask].mean(dtype=np.float64)) if mask.any() else 0.0


def _difficulty_weights(
    config: ByDifficulty, trajectories: Sequence[Trajectory], advantages: Float64s, owners: NDArray[np.intp]
) -> Float64s:
    """Return the weight of each trajectory's group, [S]; groups without an advantage take no part.

    A group in which nobody gets anything cannot teach its task, so it weighs as an easy one, as in their program.
    """
    means: dict[str, list[float]] = {}
    for t in trajectories:
        means.setdefault(t.group_id, []).append(_trajectory_value(config.value, t))
    live = sorted({trajectories[i].group_id for i in owners[np.abs(advantages) > UNIFORM_SPREAD]})
    if not live:
        return np.ones(len(trajectories))
    ease = np.array([float(np.mean(means[group])) for group in live])
    solved = np.where(ease > UNIFORM_SPREAD, ease, max(1.0, float(ease.max())))
    scores = -solved / config.temperature
    shares = np.exp(scores - scores.max())
    weights = dict(zip(live, len(live) * shares / shares.sum(), strict=True))
    return np.array([weights.get(t.group_id, 0.0) for t in trajectories])


def _trajectory_value(name: str, t: Trajectory) -> float:
    if name == "correct" and t.correct is not None:
        return float(t.correct)
    if name in ("return", "correct"):
        return t.return_
    return float(sum(reward.value for reward in t.rewards if reward.name == name))


def _turn_values(term: Comparison, t: Trajectory) -> Float64s:
    turns = t.action_turn_indices
    if term.value == "return":
        return np.full(len(turns), t.return_)
    if term.value == "return_to_go":
        return turn_returns(rewards_of_turns(t, turns), discount=term.discount)
    return rewards_of_turns(t, turns, name=term.value)


def rewards_of_turns(t: Trajectory, turns: Sequence[int], *, name: str = "") -> Float64s:
    """Return the rewards [J] of action turns.

    A reward of a different turn, for example of the observation that follows an action, belongs to the action
    turn before it, or to the first one.

    Args:
        t: the trajectory.
        turns: indices of its action turns, in order.
        name: name of the rewards that count; "": all do.
    """
    rewards = np.zeros(len(turns))
    totals: dict[int, float] = {}
    for reward in t.rewards:
        if not name or reward.name == name:
            totals[reward.turn] = totals.get(reward.turn, 0.0) + reward.value
    if turns:
        for index, value in totals.items():
            rewards[max(0, bisect_right(turns, index) - 1)] += value
    return rewards


def _spread_trajectories(values: Float64s, trajectories: Sequence[Trajectory]) -> Float64s:
    return np.repeat(values, [len(t) for t in trajectories])


def _spread_turns(values: Float64s, trajectories: Sequence[Trajectory]) -> Float64s:
    """Put the values of action turns on their tokens, [ΣT]; other tokens get 0."""
    rows, start = [], 0
    for t in trajectories:
        index, row = t.action_turn_index(), np.zeros(len(t))
        turns = t.action_turn_indices
        for turn, value in zip(turns, values[start : start + len(turns)], strict=True):
            row[index == turn] = value
        rows.append(row)
        start += len(turns)
    return np.concatenate([np.zeros(0), *rows])


def has_signal(config: AdvantageConfig, trajectories: Sequence[Trajectory]) -> bool:
    """Return whether a kind of advantage gives any trajectory of a unit one other than zero.

    A greedy member serves as baseline and is not compared. A family may have several groups: each is compared within
    itself, and a trajectory with an advantage of its own with nobody. With several rewards two members may have equal
    returns and still differ, so a sum of comparisons is asked itself.

    Args:
        config: the kind of advantage.
        trajectories: members of a rollout group, or of all groups of a family that are trained.
    """
    if any(t.advantage for t in trajectories):
        return True
    compared = [t for t in trajectories if not t.baseline and t.advantage is None]
    return any(_differ(config, members) for members in _by_group(compared))


def informative_factor(config: AdvantageConfig, trajectories: Sequence[Trajectory]) -> float:
    """Return the factor that makes up for groups without a signal: all groups / groups with one, at least 1.

    RAPO, arXiv:2509.24107; see `learner.algorithms.advantages.informative_scale`. A sum of comparisons is asked itself,
    because returns may be equal where its values are not.
    """
    if not isinstance(config, ComparedAdvantage):
        return informative_scale([t.return_ for t in trajectories], [t.group_id for t in trajectories])
    groups = _by_group([t for t in trajectories if not t.baseline])
    informative = sum(_differ(config, members) for members in groups)
    return len(groups) / informative if informative else 1.0


def _by_group(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        groups.setdefault(t.group_id, []).append(t)
    return list(groups.values())


def _differ(config: AdvantageConfig, members: Sequence[Trajectory]) -> bool:
    """Return whether members of one group, at least one, are not all worth the same."""
    if not isinstance(config, ComparedAdvantage):
        return not uniform(np.array([t.return_ for t in members]))
    alone = config.model_copy(update={"whiten": "none", "by_difficulty": None})
    return bool((np.abs(compared_advantages(alone, members)) > UNIFORM_SPREAD).any())
