"""Tells which rollout groups, and which families of them, would train nothing."""

from collections.abc import Sequence

import numpy as np

from learner.algorithms.advantages import informative_scale
from learner.algorithms.comparisons import UNIFORM_SPREAD
from learner.credit.compared import compared_advantages
from learner.credit.comparison_config import ComparedAdvantage
from learner.settings.advantages import GROUP_RELATIVE, AdvantageConfig
from learner.trajectory import Trajectory


def judges_groups(config: AdvantageConfig) -> bool:
    """Return whether an advantage is formed within a rollout group alone, so that a group without signal is known.

    Example:
        >>> from learner.settings.advantages import GroupAdvantage
        >>> judges_groups(GroupAdvantage()), judges_groups(ComparedAdvantage(terms=[{"among": ["batch"]}]))
        (True, False)
    """
    if isinstance(config, ComparedAdvantage):
        return all("group" in term.among for term in config.terms)
    return config.kind in GROUP_RELATIVE


def has_signal(config: AdvantageConfig, trajectories: Sequence[Trajectory]) -> bool:
    """Return whether the credit rule gives any trajectory of a unit an advantage other than zero.

    A greedy member serves as baseline and is not compared. A family may have several groups: each is compared within
    itself, and a trajectory with an advantage of its own with nobody. With several rewards two members may have equal
    returns and still differ, so a sum of comparisons is asked itself.

    Args:
        config: the credit rule.
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
        return len({t.return_ for t in members}) > 1
    alone = config.model_copy(update={"whiten": "none", "by_difficulty": None})
    return bool((np.abs(compared_advantages(alone, members)) > UNIFORM_SPREAD).any())
