"""Puts the segments of a delivery together to trajectories, and composes their rewards. Pure functions."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from learner.credit.reward_config import RewardConfig
from learner.credit.rewards.composition import as_given, composed, updates_at
from learner.errors import BrokenTrajectory
from learner.segments import assemble
from learner.trajectory import RouteLayers, Trajectory
from learner.units import Counts, newest_version
from protocol.arrays import SegmentArrays
from protocol.version_line import VersionLine

log = logging.getLogger(__name__)


def trajectories_of(
    segments: Sequence[SegmentArrays],
    line: VersionLine,
    counts: Counts,
    layers: RouteLayers | None = None,
) -> list[Trajectory]:
    """Assemble the trajectories of a unit. A broken one is counted and left out; its group stays.

    Args:
        layers: see `learner.segments.assemble`.
    """
    by_id: dict[str, list[SegmentArrays]] = {}
    for part in segments:
        by_id.setdefault(part.segment.trajectory_id, []).append(part)
    trajectories = []
    for pieces in by_id.values():
        try:
            trajectories.append(placed(assemble(pieces, layers), line))
        except BrokenTrajectory as error:
            log.error("trajectory rejected: %s", error)
            counts.note("rejected", 1, sum(segment.action_tokens for segment, _ in pieces))
    return trajectories


def placed(trajectory: Trajectory, line: VersionLine) -> Trajectory:
    """Replace versions of undone steps by those of the newest line.

    The new versions have equal lag, so all later code gets the policy lag by subtracting version numbers.
    """
    return replace(trajectory, policy_version=line.placed(trajectory.policy_version))


def valued(
    trajectories: Sequence[Trajectory],
    config: RewardConfig,
    line: VersionLine,
    *,
    group: bool,
    training: bool,
) -> list[Trajectory]:
    """Compose the rewards of trajectories, as a whole group or each by itself. Failed ones have no say.

    Evaluations have the final weights only, so that their returns can be compared over a run.
    """
    if not training:
        config, group = RewardConfig(weights=config.weights_in_force), False
    if group:
        usable = iter(composed_at(line, config, [t for t in trajectories if is_usable(t)]))
        return [next(usable) if is_usable(t) else t for t in trajectories]
    return [each for t in trajectories for each in composed_at(line, config, [t], group=False)]


def composed_at(
    line: VersionLine, config: RewardConfig, members: Sequence[Trajectory], *, group: bool = True
) -> list[Trajectory]:
    """Compose the rewards of members in the stage of their newest token, from those that the environment gave."""
    if not members:
        return []
    updates = updates_at(line, newest_version(members))
    return composed(config, [as_given(t) for t in members], group=group, updates=updates)


def is_usable(trajectory: Trajectory) -> bool:
    """Return whether a trajectory can be trained."""
    return trajectory.status != "failed" and bool(trajectory.action_tokens)
