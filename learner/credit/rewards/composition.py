"""Composes rewards: from those that the environment gave to those that the policy is trained on.

Everything here is pure. The order is: the value of wrong answers, the reward of the group, rewards that are made here,
such as the penalty on long answers, gates and weights. Gates and group rewards look at sums without weights. A win rate
over the return comes last, because it compares what would be the return without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from learner.credit.reward_config import Gate, RewardConfig
from learner.credit.rewards.answer import step_value, with_wrong_answer
from learner.credit.rewards.group import WIN_RATE, group_rewards, has_win_rate_of_returns, win_rates
from learner.credit.rewards.made import made_for
from learner.credit.rewards.sums import last_turn, replaced, total_of
from learner.trajectory import Trajectory
from learner.units import newest_version
from protocol.messages.episodes import Reward
from protocol.version_line import VersionLine


def composed(
    config: RewardConfig, members: Sequence[Trajectory], *, group: bool = True, updates: int | None = None
) -> list[Trajectory]:
    """Return trajectories with the rewards that they are trained on; the given ones are kept beside them.

    Args:
        config: what to do with rewards.
        members: trajectories of one rollout group with the rewards that the environment gave, failed ones left out.
        group: whether they are a whole group; else the reward of the group does not act.
        updates: published updates by which the stage is chosen, see `updates_at`; by default the version of the
            newest token.

    Returns:
        The trajectories in the same order. One whose rewards stay what they are is the same object.
    """
    if not members:
        return []
    updates = newest_version(members) if updates is None else updates
    weights = weights_at(config, updates)
    of_groups: Sequence[list[Reward] | None] = [None] * len(members)
    if group:
        of_groups = group_rewards(config, members)
    lists = []
    for t, of_group in zip(members, of_groups, strict=True):
        rewards = t.rewards if config.wrong is None else with_wrong_answer(config.wrong, t)
        if config.steps is not None:
            rewards = replaced(t, config.steps.reward, step_value(config.steps, t))
        rewards = rewards if of_group is None else of_group
        if made := made_for(config, t, updates):
            rewards = [*rewards, *made]
        lists.append(_weighed(config, weights, t, rewards))
    if group and has_win_rate_of_returns(config):
        rates = win_rates([float(sum(r.value for r in rewards)) for rewards in lists])
        factor = weights.get(WIN_RATE, 1.0)
        turns = [
            max((r.turn for r in own), default=last_turn(t)) for t, own in zip(members, lists, strict=True)
        ]
        lists = [[Reward(WIN_RATE, turn, factor * rate)] for turn, rate in zip(turns, rates, strict=True)]
    return [
        t if rewards is t.rewards else replace(t, rewards=rewards, given_rewards=t.rewards)
        for t, rewards in zip(members, lists, strict=True)
    ]


def as_given(t: Trajectory) -> Trajectory:
    """Return a trajectory with the rewards that the environment gave, so that they can be composed again."""
    return t if t.given_rewards is None else replace(t, rewards=t.given_rewards, given_rewards=None)


def is_open(gate: Gate, t: Trajectory) -> bool:
    """Return whether a trajectory got enough of what the gate needs."""
    return total_of(t, gate.needs) > gate.above


def _weighed(
    config: RewardConfig, weights: Mapping[str, float], t: Trajectory, rewards: list[Reward]
) -> list[Reward]:
    """Return rewards after gates and weights; the same list if neither acts."""
    closed = {gate.reward for gate in config.gates if not is_open(gate, t)}
    if not any(reward.name in weights or reward.name in closed for reward in rewards):
        return rewards
    return [
        Reward(r.name, r.turn, 0.0 if r.name in closed else r.value * weights.get(r.name, 1.0))
        for r in rewards
    ]


def weights_at(config: RewardConfig, updates: int) -> Mapping[str, float]:
    """Return the weights of rewards for tokens sampled after so many published updates.

    Example:
        >>> early = {"until_version": 10, "weights": {"format": 1.0}}
        >>> config = RewardConfig(weights={"format": 0.1}, stages=[early])
        >>> weights_at(config, 9), weights_at(config, 10)
        ({'format': 1.0}, {'format': 0.1})
    """
    for stage in config.stages:
        if updates < stage.until_version:
            return {**config.weights_in_force, **stage.weights}
    return config.weights_in_force


def updates_at(line: VersionLine, version: int) -> int:
    """Return the published updates before a version, without the numbers that restarts of the learner skipped.

    Args:
        line: where versions continued older ones.
        version: a version as `VersionLine.place` returns it, counted from the newest line.

    Example:
        >>> updates_at(VersionLine(), 7), updates_at(VersionLine([(10, 20), (21, 30)]), 33)
        (7, 14)
    """
    skipped = at = line.start
    for continued, number in reversed(line.forks):
        if at >= number:
            skipped -= at - number
            at = continued
    return version - (skipped - at)
