"""RiskPO's credit: groups are bundled, and a risk measure of the bundles' sums is shared out to their members."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from learner.algorithms.risk import next_quantile, risk_advantage, share_of_paper
from learner.settings.advantages import RiskAdvantage
from learner.trajectory import Trajectory
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
        spread = float(scores[rows].std())
        if spread < STD_EPSILON:
            # All papers of the bundle are worth the same.
            continue
        for i in rows:
            places = list(papers[i].places)
            share = share_of_paper(returns[places] - means[places])
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
