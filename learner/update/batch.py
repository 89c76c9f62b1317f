"""Lays trajectories out as one batch, and decides which tokens carry gradient. Pure functions of arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from learner.advantages import TokenAdvantages
from learner.algorithms.tokens import assert_lag_bound, loss_mask
from learner.errors import RoutesUnknown
from learner.settings.origins import OriginLoss, loss_number
from learner.trajectory import FOREIGN, Origin, Trajectory
from protocol.arrays import Experts, Float32s, Int64s


@dataclass(frozen=True, eq=False)
class BatchBranches:
    """Branches of all trajectories of a batch, laid one behind the other."""

    owner: NDArray[np.int32]
    """Trajectory of each branch, [K]."""
    lengths: NDArray[np.int32]
    """Tokens of each branch, [K]."""
    places: NDArray[np.int32]
    """Index of each branch's tokens among the tokens of all trajectories, [ΣL]."""
    own: NDArray[np.bool_]
    """True if no earlier branch of the trajectory has the token, [ΣL]."""


@dataclass(frozen=True, eq=False)
class BatchRoutes:
    """Experts that tokens of a batch went through in the generators."""

    token: NDArray[np.int32]
    """Index of each row's token among the tokens of all trajectories, [n]."""
    experts: Experts
    """Rows of experts in all layers, row behind row, [n * width]."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Trajectories laid one behind the other; rank 0 sends this to the other ranks."""

    lengths: NDArray[np.int32]
    """Tokens of each trajectory, [S]."""
    temperature: Float32s
    """Temperature of each trajectory's log-probabilities, [S]: that of sampling, and 1 in a lane."""
    group: NDArray[np.int32]
    """Index of each trajectory's rollout group, [S]."""
    token_ids: NDArray[np.int32]
    """Token ids of all trajectories, [ΣT]."""
    loss_mask: NDArray[np.bool_]
    """Tokens that carry policy gradient, [ΣT]."""
    seen_mask: NDArray[np.bool_]
    """Tokens that carry policy gradient, or that the critic or imitation learns from, [ΣT]."""
    columns: dict[str, Float32s]
    """Numbers of each token by name, [ΣT] each, see `make_batch`."""
    branches: "BatchBranches | None" = None
    """Branches of the trajectories; None: each has one."""
    routes: BatchRoutes | None = None
    """Experts of tokens; None: nothing is known of any."""
    version: int = 0
    """Policy version that the batch updates."""

    @property
    def starts(self) -> Int64s:
        """Index of the first token of each trajectory, and last the number of all tokens, [S + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @cached_property
    def route_numbers(self) -> Int64s | None:
        """Number of each token's experts, [ΣT]: equal for equal rows, and 0 without a row; None if there are none.

        The numbers serve to find tokens that several trajectories can share.
        """
        if self.routes is None:
            return None
        numbers = np.zeros(len(self.token_ids), dtype=np.int64)
        rows = np.ascontiguousarray(self.routes.experts).reshape(len(self.routes.token), -1)
        # Rows as single values: numpy compares these sixty times as fast as rows of numbers.
        values = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize))).reshape(-1)
        numbers[self.routes.token] = 1 + np.unique(values, return_inverse=True)[1]
        return numbers

    @property
    def trained(self) -> Int64s:
        """Number of tokens of each trajectory that carry policy gradient, [S]."""
        return self.count(self.loss_mask)

    def count(self, mask: NDArray[np.bool_]) -> Int64s:
        """Count the tokens of each trajectory under a mask [ΣT]. The counts are [S]."""
        return counts(mask, self.starts)


def counts(mask: NDArray[np.bool_], starts: Int64s) -> Int64s:
    """Count the tokens under a mask between each start and the next."""
    sums = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    counts: Int64s = sums[starts[1:]] - sums[starts[:-1]]
    return counts


def make_batch(
    trajectories: Sequence[Trajectory],
    advantages: TokenAdvantages,
    *,
    current_version: int,
    max_policy_lag: int,
    max_replay_lag: int = 0,
    imitate_from: float | None = None,
    with_routes: bool = True,
    by_origin: Sequence[OriginLoss] = (),
    siblings: NDArray[np.int64] | None = None,
) -> Batch:
    """Lay trajectories out and decide which tokens carry gradient.

    The columns are ``fresh`` (0 or 1), ``logp_behaviour``, ``lag`` (versions), ``turn`` (index),
    ``advantage``, ``median_advantage``, ``value_mask``, ``value_target`` and ``imitation_mask``; ``lane``
    and ``foreign`` (0 or 1) if a trajectory is in one, or taught; ``loss_number`` if losses differ by origin;
    ``sibling`` with ``siblings``.

    Args:
        max_policy_lag: bound for trajectories that are trained for the first time.
        max_replay_lag: bound for replayed ones.
        imitate_from: the fresh tokens of good trajectories are imitated, see `_is_good`. The number is the
            smallest return of a good one where the environment does not tell; None: only given ones are imitated.
        with_routes: whether the batch has the experts of its tokens.
        by_origin: losses of tokens by who wrote them.
        siblings: for each trajectory the place of the one that its teacher reads, or -1; see `learner.update.siblings`.

    Raises:
        StaleTokens: a token is from a version that does not exist yet, or a fault in the mask lets a token
            pass that lags more than its bound.
    """
    bounds = [max_replay_lag if t.replayed else max_policy_lag for t in trajectories]
    within = [_within_bound(t, current_version, bound) for t, bound in zip(trajectories, bounds, strict=True)]
    present = [np.arange(len(t)) >= t.window_start for t in trajectories]
    fresh = np.concatenate([mask & here for mask, here in zip(within, present, strict=True)])
    lengths = np.array([len(t) for t in trajectories], dtype=np.int32)
    imitation = np.concatenate(within) & np.repeat(_good(trajectories, imitate_from), lengths)
    loss_mask = fresh & advantages.policy
    _assert_bounds(trajectories, loss_mask | imitation, current_version, bounds)
    origins = {t.origin for t in trajectories}
    if "given" in origins:
        imitation |= _written(trajectories, "given")
    if "taught" in origins:
        loss_mask |= _written(trajectories, "taught") & advantages.policy
    columns = {
        "fresh": fresh,
        "logp_behaviour": np.concatenate([t.logp_behaviour for t in trajectories]),
        "lag": np.where(fresh, current_version - np.concatenate([t.policy_version for t in trajectories]), 0),
        "turn": np.concatenate([t.action_turn_index() for t in trajectories]),
        "advantage": advantages.advantage,
        "median_advantage": advantages.median_advantage,
        "value_mask": advantages.value,
        "value_target": advantages.value_target,
        "imitation_mask": imitation,
    }
    if any(t.lane for t in trajectories):
        columns["lane"] = np.repeat([t.lane for t in trajectories], lengths)
    if "taught" in origins:
        columns["foreign"] = _written(trajectories, "taught")
    if siblings is not None:
        columns["sibling"] = np.repeat(siblings, lengths)
    if by_origin:
        columns["loss_number"] = np.repeat([loss_number(by_origin, t) for t in trajectories], lengths)
    return Batch(
        lengths=lengths,
        temperature=np.array([1.0 if t.lane else t.temperature for t in trajectories], dtype=np.float32),
        group=np.unique([t.group_id for t in trajectories], return_inverse=True)[1].astype(np.int32),
        token_ids=np.concatenate([t.token_ids for t in trajectories]),
        loss_mask=loss_mask,
        seen_mask=loss_mask | advantages.value | imitation,
        columns={name: np.ascontiguousarray(column, dtype=np.float32) for name, column in columns.items()},
        branches=_branches(trajectories),
        routes=_routes(trajectories) if with_routes else None,
        version=current_version,
    )


def _written(trajectories: Sequence[Trajectory], origin: Origin) -> NDArray[np.bool_]:
    """Return the learnt tokens of trajectories of one origin, [ΣT]."""
    return np.concatenate([t.learned_mask & (t.origin == origin) for t in trajectories])


def _branches(trajectories: Sequence[Trajectory]) -> BatchBranches | None:
    if not any([turn.back != 1 for t in trajectories for turn in t.turns]):
        return None
    found = [(number, branch) for number, t in enumerate(trajectories) for branch in t.branches()]
    starts = np.concatenate([[0], np.cumsum([len(t) for t in trajectories])])
    places = [starts[number] + branch.places for number, branch in found]
    return BatchBranches(
        owner=np.array([number for number, _ in found], dtype=np.int32),
        lengths=np.array([len(branch.places) for _, branch in found], dtype=np.int32),
        places=np.concatenate(places).astype(np.int32),
        own=np.concatenate([branch.own for _, branch in found]),
    )


def _routes(trajectories: Sequence[Trajectory]) -> BatchRoutes | None:
    if not any(len(t.routed_token) for t in trajectories):
        return None
    widths = {len(t.routed_experts) // len(t.routed_token) for t in trajectories if len(t.routed_token)}
    if len(widths) > 1:
        raise RoutesUnknown(
            f"generators sent {' and '.join(map(str, sorted(widths)))} experts for a token; all must serve one model"
        )
    starts = np.cumsum([0, *(len(t) for t in trajectories[:-1])])
    tokens = [start + t.routed_token for start, t in zip(starts, trajectories, strict=True)]
    rows = [t.routed_experts for t in trajectories if len(t.routed_token)]
    experts: Experts = np.concatenate(rows)  # type: ignore[assignment]
    return BatchRoutes(np.concatenate(tokens).astype(np.int32), experts)


def _good(trajectories: Sequence[Trajectory], smallest_return: float | None) -> NDArray[np.bool_]:
    """Return which trajectories are imitated, [S]; none if ``smallest_return`` is None."""
    good = [smallest_return is not None and _is_good(t, smallest_return) for t in trajectories]
    return np.array(good, dtype=np.bool_)


def _is_good(t: Trajectory, smallest_return: float) -> bool:
    """Return whether a trajectory ended and solved its task.

    A wrong answer with partial credit is not good. The return decides only if the environment does not tell.
    """
    if t.status == "unfinished":
        return False
    return t.return_ >= smallest_return if t.correct is None else t.correct


def _within_bound(t: Trajectory, current_version: int, max_policy_lag: int) -> NDArray[np.bool_]:
    """Return the action tokens that are fresh enough. A greedy trajectory has none, nor has one that another policy
    wrote, because it has no behaviour distribution to train against, and neither has one of a lane that is not right.
    """
    if t.unused or t.origin in FOREIGN:
        return np.zeros(len(t), dtype=np.bool_)
    return loss_mask(
        t.learned_mask,
        t.policy_version,
        current_version=current_version,
        max_policy_lag=max_policy_lag,
    )


def _assert_bounds(
    trajectories: Sequence[Trajectory], mask: NDArray[np.bool_], current_version: int, bounds: Sequence[int]
) -> None:
    """Check the lag bounds on the very mask by which gradient flows."""
    start = 0
    for t, bound in zip(trajectories, bounds, strict=True):
        assert_lag_bound(
            mask[start : start + len(t)],
            t.policy_version,
            current_version=current_version,
            max_policy_lag=bound,
            trajectory_id=t.trajectory_id,
        )
        start += len(t)
