"""Rewards that are made here and that no environment gives, and their names."""

import math

from learner.branches import turns_before
from learner.credit.reward_config import CoolingBonus, Coverage, FlawedAnswer, OverlongPenalty, RewardConfig
from learner.credit.rewards.group import WIN_RATE, has_win_rate_of_returns
from learner.credit.rewards.sums import last_turn, mark_total, total_of
from learner.trajectory import Trajectory
from protocol.messages.episodes import Reward

OVERLONG = "overlong"
"""Name of the reward that is the penalty on long answers."""
BONUS = "bonus"
"""Name of the reward that is the bonus for calls."""
COVERAGE = "coverage"
"""Name of the reward for states that are new to a trajectory."""
FLAWED = "flawed"
"""Name of the reward that is the penalty on right answers by a flawed way."""


def made_rewards(config: RewardConfig) -> set[str]:
    """Return the names of rewards that are made here, and that no environment gives.

    Example:
        >>> sorted(made_rewards(RewardConfig(group={"kind": "win_rate"})))
        ['win_rate']
    """
    parts = {
        BONUS: config.bonus is not None,
        COVERAGE: config.coverage is not None,
        FLAWED: config.flawed is not None,
        OVERLONG: config.length is not None,
        WIN_RATE: has_win_rate_of_returns(config),
    }
    return {name for name, there in parts.items() if there}


def made_for(config: RewardConfig, t: Trajectory, updates: int) -> list[Reward]:
    """Return the rewards of a trajectory that no environment gives, before gates and weights."""
    made = [] if config.coverage is None else coverage_gains(config.coverage, t)
    if config.bonus is not None:
        calls = mark_total(t, config.bonus.mark)
        made.append(Reward(BONUS, last_turn(t), cooling_bonus(config.bonus, calls, updates)))
    if config.flawed is not None and is_flawed(config.flawed, t):
        made.append(Reward(FLAWED, last_turn(t), -config.flawed.penalty))
    if config.length is not None:
        penalty = overlong_penalty(config.length, int(t.learned_mask.sum()))
        made.append(Reward(OVERLONG, last_turn(t), penalty))
    return made


def overlong_penalty(config: OverlongPenalty, tokens: int) -> float:
    r"""Return the penalty for an answer of so many tokens, from -factor to 0.

    .. math:: -f \cdot \mathrm{clip}\left(\frac{n - (L_\max - L_\mathrm{buf})}{L_\mathrm{buf}}, 0, 1\right)

    DAPO, arXiv:2503.14476, section 3.4.

    Example:
        >>> config = OverlongPenalty(longest_tokens=20480, buffer_tokens=4096)
        >>> [overlong_penalty(config, n) for n in (16384, 18432, 20480, 99999)]
        [0.0, -0.5, -1.0, -1.0]
    """
    over = tokens - (config.longest_tokens - config.buffer_tokens)
    return -config.factor * min(1.0, over / config.buffer_tokens) if over > 0 else 0.0


def cooling_bonus(config: CoolingBonus, calls: float, updates: int) -> float:
    r"""Return the bonus for so many calls after so many published updates.

    .. math:: \frac{1 + \cos(\pi v / T)}{2} \min(0.1\, m, 1) \quad (v \le T), \qquad 0 \text{ after}

    SPEAR, arXiv:2509.22601, with T = 100.

    Example:
        >>> [round(cooling_bonus(CoolingBonus(), 5, v), 4) for v in (0, 50, 100, 999)]
        [0.5, 0.25, 0.0, 0.0]
    """
    share = (1 + math.cos(math.pi * min(1.0, max(0, updates) / config.until_version))) / 2
    return share * min(config.per_call * calls, config.most)


def coverage_gains(config: Coverage, t: Trajectory) -> list[Reward]:
    r"""Return the marginal gain of each turn that led to a new state.

    .. math:: g_t = F(S_t \cup \{s_{t+1}\}) - F(S_t), \qquad F(S) = c \, |S|

    SubPO, arXiv:2307.13372, section 3. A mark is the state that a turn was taken in, so the gain of a state belongs to
    the turn before it in its branch. The first state is no gain, and the state after the last turn is not known.
    """
    states = {mark.turn: mark.value for mark in t.marks if mark.name == config.mark}
    before, acts = turns_before(t.turns), set(t.action_turn_indices)
    led: dict[int | None, int | None] = {None: None}
    seen: set[str | float] = set()
    gains = []
    for turn in t.turns:
        index, cause = turn.index, led[before[turn.index]]
        led[index] = index if index in acts else cause
        if index not in acts or index not in states or states[index] in seen:
            continue
        seen.add(states[index])
        if cause is not None:
            gains.append(Reward(COVERAGE, cause, config.each))
    return gains


def is_flawed(config: FlawedAnswer, t: Trajectory) -> bool:
    """Return whether an answer is right and its way is not."""
    return total_of(t, config.reward) > 0 and total_of(t, config.needs) < config.least
