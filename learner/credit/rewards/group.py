"""The reward of the group: the value of an answer beside the other answers of its rollout group."""

import math
from collections.abc import Sequence
from typing import assert_never

from learner.credit.reward_config import FewestCalls, RewardConfig, WinRate
from learner.credit.rewards.sums import mark_total, replaced, total_of
from learner.trajectory import Trajectory
from protocol.messages.episodes import Reward

WIN_RATE = "win_rate"
"""Name of the reward that is the win rate of the return."""


def has_win_rate_of_returns(config: RewardConfig) -> bool:
    """Return whether all rewards are replaced by the win rate of their sum."""
    return isinstance(config.group, WinRate) and config.group.reward == "return"


def group_rewards(config: RewardConfig, members: Sequence[Trajectory]) -> list[list[Reward] | None]:
    """Return the rewards of each member after the reward of the group; None where it does not act."""
    rule = config.group
    match rule:
        case None:
            return [None] * len(members)
        case FewestCalls(reward=name):
            right = [calls_of(rule, t) for t in members if total_of(t, name) > 0]
            return [_by_calls(rule, t, min(right)) if right else None for t in members]
        case WinRate(reward="return"):
            return [None] * len(members)
        case WinRate(reward=name):
            rates = win_rates([total_of(t, name) for t in members])
            return [replaced(t, name, rate) for t, rate in zip(members, rates, strict=True)]
        case _:
            assert_never(rule)


def _by_calls(rule: FewestCalls, t: Trajectory, fewest: int) -> list[Reward] | None:
    if total_of(t, rule.reward) <= 0:
        return None
    factor = call_factor(calls_of(rule, t), fewest, smooth=rule.smooth)
    return [Reward(r.name, r.turn, r.value * factor) if r.name == rule.reward else r for r in t.rewards]


def calls_of(config: FewestCalls, t: Trajectory) -> int:
    """Return the calls that a trajectory took."""
    if not config.calls:
        return max(0, t.action_turns - 1)
    return round(mark_total(t, config.calls))


def call_factor(calls: int, fewest: int, *, smooth: float = 1.0) -> float:
    r"""Return the factor of a right answer that took m calls, where n were the fewest, [0, 1].

    .. math::
        f = \frac{2nm}{n + m}, \qquad
        r = \sin\frac{\pi f}{2n}, \quad \text{and for } n = 0: \; r = \cos\frac{\pi m}{2m + c}

    OTC, arXiv:2504.14870. It is 1 at m = n. At m = n = 0 it is 1.

    Example:
        >>> [round(call_factor(m, 2), 4) for m in (1, 2, 3, 4)], round(call_factor(1, 0), 4)
        ([0.866, 1.0, 0.9511, 0.866], 0.5)
    """
    if fewest == 0:
        return 1.0 if calls == 0 else math.cos(math.pi * calls / (2 * calls + smooth))
    return math.sin(math.pi * calls / (fewest + calls))


def win_rates(values: Sequence[float]) -> list[float]:
    r"""Return for each value the share of the others that it beats; a draw counts half.

    .. math:: r_i = \frac{1}{k - 1} \sum_{j \ne i} P(x_i \text{ beats } x_j)

    SPO, arXiv:2401.04056. The mean is 1/2. A lone member gets 1/2.

    Example:
        >>> win_rates([3.0, 1.0, 2.0]), win_rates([1.0, 1.0]), win_rates([7.0])
        ([1.0, 0.0, 0.5], [0.5, 0.5], [0.5])
    """
    others = len(values) - 1
    if others < 1:
        return [0.5] * len(values)
    return [(sum(v > w for w in values) + 0.5 * (sum(v == w for w in values) - 1)) / others for v in values]
