"""Advantages: from rewards, and values where there is a critic, to an advantage for every token.

These pure functions run on rank 0, on whole trajectories. "Rows" are trajectories laid one behind the other: ΣT tokens.
RiskPO (arXiv:2510.00911) compares bundles of groups, and passes running quantiles on from step to step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from learner.algorithms import advantages as adv
from learner.algorithms import advantages as truncation
from learner.algorithms.advantages import next_quantile, risk_advantage, share_of_paper
from learner.algorithms.values import lambda_returns, vtrace_targets
from learner.comparisons import compared_advantages, informative_factor
from learner.families.branching import shared_prefix_advantages, success_rates
from learner.formulas import Rollouts, load_formula
from learner.settings.advantages import (
    AdvantageConfig,
    GaeAdvantage,
    GreedyAdvantage,
    RiskAdvantage,
    TokenGroupAdvantage,
    comparisons_of,
    is_by_turn,
)
from learner.settings.algorithm import AlgorithmConfig, CriticConfig
from learner.settings.formulas import OwnAdvantage
from learner.trajectory import Trajectory
from protocol import names
from protocol.arrays import Float64s

STD_EPSILON = 1e-6


class Quantiles(NamedTuple):
    """Running quantiles of the sums of papers, which each learner step passes on to the next one."""

    low: float
    high: float


class Paper(NamedTuple):
    """The j-th member of each group of a bundle, as places in the batch."""

    bundle: int
    places: tuple[int, ...]


def papers_of(trajectories: Sequence[Trajectory], bundle: int) -> list[Paper]:
    """Return the papers of a batch: groups in the order of the batch, `bundle` of them at a time.

    A bundle has as many papers as its smallest group has members. The last bundle may have fewer groups.
    """
    groups: dict[str, list[int]] = {}
    for i, t in enumerate(trajectories):
        groups.setdefault(t.group_id, []).append(i)
    members = list(groups.values())
    bundles = [members[i : i + bundle] for i in range(0, len(members), bundle)]
    return [
        Paper(number, tuple(group[j] for group in tasks))
        for number, tasks in enumerate(bundles)
        for j in range(min(map(len, tasks)))
    ]


def mean_scores(trajectories: Sequence[Trajectory], papers: Sequence[Paper], bundle: int) -> Float64s:
    """Return the sum of returns of each paper, [P]; that of a smaller bundle is scaled to `bundle` tasks."""
    return np.array(
        [bundle * float(np.mean([trajectories[i].return_ for i in paper.places])) for paper in papers]
    )


def risk_advantages(
    config: RiskAdvantage, trajectories: Sequence[Trajectory], known: Quantiles | None
) -> tuple[Float64s, Quantiles]:
    """Compute the advantage of each trajectory, [S], and the quantiles after this batch.

    Args:
        config: settings of the advantage.
        trajectories: members of all rollout groups of the batch.
        known: quantiles before this batch; None: the first batch, whose own quantiles are taken.
    """
    papers = papers_of(trajectories, config.bundle)
    scores = mean_scores(trajectories, papers, config.bundle)
    if known is None:
        known = Quantiles(*(float(q) for q in np.quantile(scores, config.levels)))
    by_paper = risk_advantage(
        scores,
        quantiles=known,
        levels=config.levels,
        mix=config.mix,
        natural_baseline=config.natural_baseline,
    )
    returns = np.array([t.return_ for t in trajectories])
    means = _group_means(trajectories, returns)
    advantages = np.zeros(len(trajectories))
    for number in range(1 + max((paper.bundle for paper in papers), default=-1)):
        rows = [i for i, paper in enumerate(papers) if paper.bundle == number]
        # The authors divide by the deviation of the sample, and take 1 for a lone paper.
        spread = float(scores[rows].std(ddof=1)) if len(rows) > 1 else 1.0
        if spread < STD_EPSILON:
            # All papers of the bundle are worth the same.
            continue
        for i in rows:
            places = list(papers[i].places)
            share = share_of_paper(returns[places] - means[places], most=config.most_share)
            advantages[places] = by_paper[i] / (spread + STD_EPSILON) * share
    low, high = (
        next_quantile(q, scores, level=level, rate=config.rate)
        for q, level in zip(known, config.levels, strict=True)
    )
    return advantages, Quantiles(low, high)


def _group_means(trajectories: Sequence[Trajectory], returns: Float64s) -> Float64s:
    """Return the mean return of each trajectory's group, [S]."""
    groups: dict[str, list[float]] = {}
    for t, value in zip(trajectories, returns, strict=True):
        groups.setdefault(t.group_id, []).append(float(value))
    return np.array([float(np.mean(groups[t.group_id])) for t in trajectories])


Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TokenAdvantages:
    """Advantages, masks and value targets of the tokens of all rows, [ΣT] each."""

    advantage: Float64s
    median_advantage: Float64s
    """Advantage against the group's median instead of its mean, for bounded-ratio objectives."""
    policy: Mask
    """Tokens that may carry policy gradient: the tokens of the present window, without an ignored tail."""
    value: Mask
    """Tokens the critic learns from."""
    value_target: Float64s

    @classmethod
    def of_trajectories(
        cls, advantages: Float64s, median: Float64s, trajectories: Sequence[Trajectory]
    ) -> "TokenAdvantages":
        """Give all tokens of a trajectory its advantage; no critic."""
        lengths = [len(t) for t in trajectories]
        return cls.of_tokens(np.repeat(advantages, lengths), np.repeat(median, lengths))

    @classmethod
    def of_tokens(cls, advantage: Float64s, median: Float64s) -> "TokenAdvantages":
        """Give every token its own advantage and let all carry policy gradient; no critic."""
        return cls(
            advantage=advantage,
            median_advantage=median,
            policy=np.ones(len(advantage), dtype=np.bool_),
            value=np.zeros(len(advantage), dtype=np.bool_),
            value_target=np.zeros(len(advantage)),
        )

    def with_none_behind(self, tokens: int) -> "TokenAdvantages":
        """Return them with so many further tokens behind, from which neither policy nor critic learns."""
        if not tokens:
            return self
        parts = (np.concatenate([part, np.zeros(tokens, part.dtype)]) for part in vars(self).values())
        return TokenAdvantages(*parts)


@dataclass(frozen=True, eq=False)
class Estimates:
    """Estimates by the critic and by the learner's weights for the tokens of all rows, [ΣT] each."""

    value: Float64s
    """Value before each action token; 0 on observation tokens."""
    ratio_proximal_behaviour: Float64s
    """Ratio at each action token; 1 on observation tokens. It has a meaning only if the critic's targets are
    V-trace, or if the critic is a value head."""


def assign_advantages(
    config: AlgorithmConfig,
    trajectories: Sequence[Trajectory],
    estimates: Estimates | None = None,
    fresh: Mask | None = None,
    *,
    window_tokens: int = 0,
    current_version: int = 0,
) -> TokenAdvantages:
    """Compute advantages, and targets for the critic if there is one.

    The advantages of a group whose name says that its task was dealt n times of late are divided by n.

    Args:
        trajectories: members of all rollout groups, in any order.
        estimates: needed for advantages of kind "gae".
        fresh: tokens [ΣT] within the lag bound, over which advantages of kind "gae" are whitened; all tokens
            by default.
        window_tokens: largest number of action tokens in a window, for advantages of kind "gae".
        current_version: policy version that the step updates, for advantages of the user's own.

    Raises:
        ValueError: a return is not finite, a greedy member is missing where one is needed, or a critic or its
            estimates are missing for advantages of kind "gae".
        FormulaError: an advantage of the user's own cannot be computed, or is not one number for each trajectory or
            token.
    """
    if any(t.lane for t in trajectories):
        return _beside_lane(config, trajectories, current_version)
    assigned = _assigned(config, trajectories, estimates, fresh, window_tokens, current_version)
    uses = np.array([names.choice_of(t.group_id).uses for t in trajectories])
    if (uses == 1).all():
        return assigned
    # Ours: VSPO (arXiv:2512.07478) damps tasks that were drawn several times, and does not say how.
    each = np.repeat(uses, [len(t) for t in trajectories])
    return replace(
        assigned, advantage=assigned.advantage / each, median_advantage=assigned.median_advantage / each
    )


def _beside_lane(
    config: AlgorithmConfig, trajectories: Sequence[Trajectory], current_version: int
) -> TokenAdvantages:
    """Return advantages where some members are in a lane: the others are compared as if these were not there."""
    own = [t for t in trajectories if not t.lane]
    assigned = assign_advantages(config, own, current_version=current_version) if own else None
    lengths = [len(t) for t in trajectories]
    lane = np.repeat([t.lane for t in trajectories], lengths)
    advantage = np.repeat([t.advantage or 0.0 for t in trajectories], lengths)
    median = advantage.copy()
    if assigned is not None:
        advantage[~lane], median[~lane] = assigned.advantage, assigned.median_advantage
    return TokenAdvantages.of_tokens(advantage, median)


def _assigned(
    config: AlgorithmConfig,
    trajectories: Sequence[Trajectory],
    estimates: Estimates | None,
    fresh: Mask | None,
    window_tokens: int,
    current_version: int,
) -> TokenAdvantages:
    formed = None
    if isinstance(config.advantage, OwnAdvantage):
        formed = own_advantages(config.advantage, Rollouts(trajectories, current_version))
        if len(formed) != len(trajectories):
            return TokenAdvantages.of_tokens(formed, formed)
    if isinstance(config.advantage, GaeAdvantage):
        if estimates is None or config.critic is None:
            raise ValueError("advantages of kind gae need a critic; add [learner.algorithm.critic]")
        return _estimated(config.advantage, config.critic, trajectories, estimates, fresh, window_tokens)
    compared = comparisons_of(config.advantage)
    if compared is not None and (is_by_turn(compared) or compared.whiten == "tokens"):
        advantage = compared_advantages(compared, trajectories)
        if config.scale_by_informative:
            advantage = advantage * informative_factor(compared, trajectories)
        return TokenAdvantages.of_tokens(advantage, advantage)
    if formed is None:
        advantages, median = trajectory_advantages(config.advantage, trajectories)
    else:
        advantages = median = formed
    if config.scale_by_informative:
        own = [t for t in trajectories if t.advantage is None]
        advantages = advantages * informative_factor(config.advantage, own)
    stored = np.array([np.nan if t.advantage is None else t.advantage for t in trajectories])
    advantages = np.where(np.isnan(stored), advantages, stored)
    median = np.where(np.isnan(stored), median, stored)
    if config.shared_prefix != "own":
        shared = [
            shared_prefix_advantages(trajectories, each, shared=config.shared_prefix)
            for each in (advantages, median)
        ]
        return TokenAdvantages.of_tokens(*shared)
    return TokenAdvantages.of_trajectories(advantages, median, trajectories)


def own_advantages(config: OwnAdvantage, rollouts: Rollouts) -> Float64s:
    """Return what a formula of the user's own says, by trajectory [S] or by token [ΣT].

    Raises:
        FormulaError: it raised an exception, or returned something else.
    """
    formula = load_formula(config, "learner.algorithm.advantage")
    result = formula(rollouts)
    trajectories, tokens = len(rollouts.trajectories), sum(len(t) for t in rollouts.trajectories)
    try:
        found: Float64s = np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError):
        raise formula.refused(f"returned {type(result).__name__}; return an array of numbers") from None
    if found.shape not in ((trajectories,), (tokens,)):
        raise formula.refused(
            f"returned advantages of shape {found.shape}; return one for each of the {trajectories} trajectories, or "
            f"one for each of their {tokens} tokens"
        )
    return found


def trajectory_advantages(
    config: AdvantageConfig, trajectories: Sequence[Trajectory]
) -> tuple[Float64s, Float64s]:
    """Return the advantage of each trajectory, and its advantage against the group's median, [S] each.

    Raises:
        ValueError: a return is not finite, a greedy member is missing where one is needed, or advantages of
            this kind are per token.
    """
    returns, groups = _returns(trajectories), [t.group_id for t in trajectories]
    median = adv.median_relative_advantage(returns, groups)
    compared = comparisons_of(config)
    match config:
        case TokenGroupAdvantage(ceiling=ceiling):
            lengths = np.array([t.action_tokens for t in trajectories])
            return adv.token_group_advantage(returns, lengths, groups, ceiling=ceiling), median
        case GreedyAdvantage():
            return _greedy_advantages(trajectories, returns, groups), median
        case _ if compared is not None and not is_by_turn(compared):
            return compared_advantages(compared, trajectories), median
        case _:
            raise ValueError(f"advantages of kind {config.kind} are per token")


def _returns(trajectories: Sequence[Trajectory]) -> Float64s:
    return np.array([t.return_ for t in trajectories])


def _greedy_advantages(
    trajectories: Sequence[Trajectory], returns: Float64s, groups: Sequence[str]
) -> Float64s:
    baselines = {t.group_id: t.return_ for t in trajectories if t.baseline}
    missing = sorted(set(groups) - set(baselines))
    if missing:
        raise ValueError(f"group {missing[0]} has no greedy member to be compared with")
    return adv.greedy_baseline_advantage(returns, np.array([baselines[group] for group in groups]))


def _estimated(
    config: GaeAdvantage,
    critic: CriticConfig,
    trajectories: Sequence[Trajectory],
    estimates: Estimates,
    fresh: Mask | None,
    window_tokens: int,
) -> TokenAdvantages:
    """Compute advantages from values, token by token, whitened over the batch's policy tokens."""
    total = len(estimates.value)
    advantage, target = np.zeros(total), np.zeros(total)
    policy, value_mask = np.zeros(total, dtype=np.bool_), np.zeros(total, dtype=np.bool_)
    by_success = critic.target == "success"
    rates = success_rates(trajectories) if by_success else target
    start = 0
    for t in trajectories:
        row = slice(start, start + len(t))
        actions = start + np.flatnonzero(t.learned_mask)
        window = actions[actions >= start + t.window_start]
        finished = t.status != "unfinished"
        rewards = _rewards(critic, t)
        trace = _trace(config, t, window_tokens)
        advantage[window] = _window_advantage(
            config, t, rewards, estimates.value[row], window - start, trace=trace
        )
        tail = truncation.tail_mask(len(window), finished=finished, ignore=config.ignored_tail)
        policy[window] = tail
        whole = by_success or critic.target == "monte_carlo"
        if len(actions) and (finished or not whole):
            learned = actions if whole else window
            value_mask[learned] = True
            rewards = rates[learned] if by_success else rewards[learned - start]
            target[learned] = _value_targets(
                config, critic, rewards, estimates, learned, advantage[learned], finished
            )
        start += len(t)
    if config.whiten:
        advantage = adv.whiten(advantage, policy if fresh is None else policy & fresh)
    advantage = advantage.clip(-config.ceiling, config.ceiling)
    return TokenAdvantages(advantage, advantage, policy, value_mask, target)


def _rewards(critic: CriticConfig, t: Trajectory) -> Float64s:
    """Return rewards by token, [T]; where values are rates of success, 1 alone, for the end of a right answer."""
    if critic.target != "success":
        return t.reward_per_token()
    rewards = np.zeros(len(t))
    rewards[np.flatnonzero(t.learned_mask)[-1:]] = t.status != "unfinished" and t.solved
    return rewards


def _trace(config: GaeAdvantage, t: Trajectory, window_tokens: int) -> float:
    """Return lambda for a trajectory."""
    if not config.adaptive_alpha or not t.action_tokens:
        return config.trace
    return truncation.adaptive_trace(
        t.action_tokens,
        unfinished=t.status == "unfinished",
        window=window_tokens,
        alpha=config.adaptive_alpha,
        base=config.trace,
    )


def _window_advantage(
    config: GaeAdvantage,
    t: Trajectory,
    rewards: Float64s,
    values: Float64s,
    window: NDArray[np.intp],
    *,
    trace: float,
) -> Float64s:
    if not len(window):
        return np.zeros(0)
    return truncation.extended_gae(
        rewards[window],
        values[window],
        finished=t.status != "unfinished",
        discount=config.discount,
        trace=trace,
    )


def _value_targets(
    config: GaeAdvantage,
    critic: CriticConfig,
    rewards: Float64s,
    estimates: Estimates,
    tokens: NDArray[np.intp],
    advantage: Float64s,
    finished: bool,
) -> Float64s:
    """Return the targets of tokens from their rewards; with "success" these are the targets themselves."""
    values = estimates.value[tokens]
    match critic.target:
        case "monte_carlo":
            return adv.monte_carlo_returns(rewards, discount=config.discount)
        case "lambda":
            return lambda_returns(advantage, values)
        case "vtrace":
            targets, _ = vtrace_targets(
                rewards,
                values,
                estimates.ratio_proximal_behaviour[tokens],
                bootstrap=0.0 if finished else float(values[-1]),
                discount=config.discount,
                trace=config.trace,
            )
            return targets
        case "success":
            return rewards
        case _:
            assert_never(critic.target)
