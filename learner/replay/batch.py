"""Mixes stored rollouts into a batch, and inserts trained rollouts into the replay table.

    rng = np.random.default_rng([seed, step])  # so that a restart draws the same items
    batch = mix(table, units, step=step, version=version, rng=rng)
    ... train on batch ...
    remember(table, units, step=step)

Replayed tokens keep the log-probabilities and versions with which they were sampled. So importance ratios
and the bound on policy lag see their true age.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, assert_never

import numpy as np

from learner.algorithms.replay import advantage_recalibrated, group_failed
from learner.replay.table import SUCCESS_RETURN, ReplayEntry, ReplayTable
from learner.rewards import mark_total
from learner.settings.learner import RESCUE_RULES, ReplayConfig
from learner.trajectory import Trajectory, Unit, newest_version


def mix(
    table: ReplayTable[Any],
    units: Sequence[Unit],
    *,
    step: int,
    version: int,
    rng: np.random.Generator,
    weight: float = 1.0,
    compose: Callable[[Sequence[Trajectory]], list[Trajectory]] = list,
) -> list[Trajectory]:
    """Return the batch: the fresh trajectories and the replayed ones.

    Rules that keep groups add whole groups, so their group-relative advantages do not change. The rule
    "advantage" adds trajectories as groups of one, with an advantage of their own. Rescue rules replace one
    member of each group that failed completely.

    Args:
        table: the replay table; expired items are evicted first.
        units: units that are trained for the first time.
        step: learner steps done.
        version: policy version about to be updated.
        rng: generator for the draws.
        weight: factor of the advantages under the rule "advantage", see
            `learner.algorithms.replay.self_imitation_weight`.
        compose: function that composes the rewards of a rescued group anew, because the reward of a group, for
            example a win rate, is another one with the stored member.
    """
    table.expire(step=step, version=version)
    fresh = [t for unit in units for t in unit.trajectories]
    match table.config.rule:
        case "uniform" | "recent" | "difficulty":
            entries = table.sample(table.quota(len(units), step=step), step=step, version=version, rng=rng)
            return fresh + [replace(t, origin="replayed") for e in entries for t in e.item.trajectories]
        case "advantage":
            if table.config.fire_at:
                entries = table.fire(step=step, version=version)
            else:
                quota = table.quota(len(fresh), step=step)
                entries = table.sample(quota, step=step, version=version, rng=rng)
            return fresh + [alone(e, table.baselines, weight=weight) for e in entries]
        case "success" | "per_prompt":
            batch: list[Trajectory] = []
            for unit in units:
                members = rescue_group(table, unit.trajectories, step=step, version=version, rng=rng)
                batch += compose(members) if any(t.replayed for t in members) else members
            return batch
        case _:
            assert_never(table.config.rule)


def remember(table: ReplayTable[Any], units: Sequence[Unit], *, step: int) -> None:
    """Insert into the table what the rule keeps of units that were trained for the first time.

    Args:
        table: the replay table.
        units: units as they were delivered, without replayed trajectories.
        step: learner steps done; from `stop_at_step` on nothing is inserted.
    """
    if table.stopped(step):
        return
    for group in units:
        match table.config.rule:
            case "uniform" | "recent" | "difficulty":
                _remember_group(table, group)
            case "advantage":
                _remember_winners(table, group)
            case "success" | "per_prompt":
                threshold = SUCCESS_RETURN[table.config.rule]
                for t in _own(group):
                    if (outcome := outcome_of(table.config, t)) > threshold:
                        _insert(table, t, advantage=0.0, return_=outcome)
            case _:
                assert_never(table.config.rule)


def rescue_group(
    table: ReplayTable[Any],
    group: Sequence[Trajectory],
    *,
    step: int,
    version: int,
    rng: np.random.Generator,
) -> list[Trajectory]:
    """Return the members; in a group that failed completely, a stored success replaces one of them."""
    outcomes = [outcome_of(table.config, t) for t in group]
    if not group_failed(outcomes):
        return list(group)
    entries = table.sample(1, step=step, version=version, rng=rng, key=prompt_key(group[0]))
    return rescue(group, [e.item for e in entries], rng, outcomes=outcomes)


def outcome_of(config: ReplayConfig, t: Trajectory) -> float:
    """Return the value by which a rescue rule judges a trajectory."""
    match config.outcome:
        case "correct":
            return t.return_ if t.correct is None else float(t.correct)
        case "return":
            return t.return_
        case name:
            return t.reward_by_name.get(name, 0.0)


def can_rescue(table: ReplayTable[Any], group: Sequence[Trajectory]) -> bool:
    """Return whether the rule can rescue this group: it failed completely, and a success may be drawn."""
    if table.config.rule not in RESCUE_RULES or not table.room():
        return False
    if not group_failed([outcome_of(table.config, t) for t in group]):
        return False
    key = prompt_key(group[0])
    return any(entry.key == key for entry in table.entries.values())


def rescue(
    group: Sequence[Trajectory],
    stored: Sequence[Trajectory],
    rng: np.random.Generator,
    *,
    outcomes: Sequence[float] | None = None,
) -> list[Trajectory]:
    """Replace one failed member by a stored success, if the group failed completely.

    ARPO (arXiv:2505.16282) replaces the first member; RAPO (arXiv:2509.24107, sections 2.2 to 2.5) and this
    function replace a random one. The success becomes a member of the group, so group-relative advantages
    include it. It keeps its own log-probabilities and versions.

    Args:
        group: members of one rollout group, at least one.
        stored: successes of the same prompt; one of them is drawn.
        rng: generator for the draw and for the member that is replaced.
        outcomes: values that say whether the group failed; the returns by default.

    Returns:
        The members in order, as many as before; unchanged if the group did not fail or nothing is stored.
    """
    members = list(group)
    # A greedy baseline keeps its place.
    sampled = [i for i, t in enumerate(members) if t.temperature > 0]
    values = [t.return_ for t in members] if outcomes is None else outcomes
    if not stored or not sampled or not group_failed(values):
        return members
    success = stored[int(rng.integers(len(stored)))]
    place = sampled[int(rng.integers(len(sampled)))]
    out = members[place]
    members[place] = replace(
        success, group_id=out.group_id, group_size=out.group_size, origin="replayed", advantage=None
    )
    return members


def alone(entry: ReplayEntry[Trajectory], baselines: Sequence[float], *, weight: float = 1.0) -> Trajectory:
    """Return a stored trajectory as a group of one, with its return minus the present baseline as advantage.

    The baseline is the median of ``baselines``; the rule is that of SPEAR (arXiv:2509.22601).
    """
    advantage = weight * float(advantage_recalibrated(entry.return_, baselines))
    name = entry.item.trajectory_id
    return replace(entry.item, group_id=name, group_size=1, origin="replayed", advantage=advantage)


def prompt_key(trajectory: Trajectory) -> str:
    """Return a hash of environment and prompt; trajectories of the same prompt have the same key."""
    prompt = np.ascontiguousarray(trajectory.token_ids[: trajectory.prompt_tokens], dtype="<i4")
    return hashlib.blake2b(trajectory.env.encode() + b"\0" + prompt.tobytes(), digest_size=16).hexdigest()


def batch_metrics(trajectories: Sequence[Trajectory], *, version: int) -> dict[str, float]:
    """Return the share of replayed trajectories in a batch and the mean lag of their tokens."""
    versions = [t.policy_version[t.action_mask] for t in trajectories if t.replayed]
    share = len(versions) / max(1, len(trajectories))
    age = version - float(np.concatenate(versions).mean()) if versions else 0.0
    return {"replay/share": share, "replay/age_mean_versions": age}


def _remember_group(table: ReplayTable[Any], group: Unit) -> None:
    trajectories = group.trajectories
    table.insert(
        group,
        key=prompt_key(trajectories[0]),
        version=newest_version(trajectories),
        return_=float(np.mean([t.return_ for t in trajectories])),
        success_rate=float(np.mean([_success(t) for t in trajectories])),
        tokens=sum(t.action_tokens for t in trajectories),
    )


def _remember_winners(table: ReplayTable[Any], group: Unit) -> None:
    mean = float(np.mean([t.return_ for t in group.trajectories]))
    table.baselines.append(mean)
    mark = table.config.only_with
    for t in _own(group):
        if t.return_ > mean and (not mark or mark_total(t, mark) > 0):
            _insert(table, t, advantage=t.return_ - mean)


def _insert(
    table: ReplayTable[Any], t: Trajectory, *, advantage: float, return_: float | None = None
) -> None:
    table.insert(
        t,
        key=prompt_key(t),
        version=newest_version([t]),
        return_=t.return_ if return_ is None else return_,
        advantage=advantage,
        success_rate=_success(t),
        tokens=t.action_tokens,
    )


def _own(group: Unit) -> list[Trajectory]:
    """Return the finished members that were sampled for this group; no greedy baseline, nothing replayed."""
    return [
        t for t in group.trajectories if t.temperature > 0 and t.status != "unfinished" and not t.replayed
    ]


def _success(t: Trajectory) -> float:
    return min(1.0, max(0.0, t.return_)) if t.correct is None else float(t.correct)
