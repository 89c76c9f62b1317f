"""Assembles trajectories from the segments that an actor streamed, and refuses what could spoil a gradient."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from learner.branches import starts_of
from learner.errors import BrokenTrajectory
from learner.trajectory import RouteLayers, Trajectory
from protocol.arrays import ROUTED_EXPERTS, ROUTED_TOKEN, TOKEN_ARRAYS, Arrays, Experts, SegmentArrays
from protocol.messages.episodes import Segment, Turn


def assemble(segments: Sequence[SegmentArrays], layers: RouteLayers | None = None) -> Trajectory:
    """Join the segments of one trajectory, given in any order.

    Args:
        layers: layers whose experts are to be replayed, so that these are checked; None: none are.

    Raises:
        BrokenTrajectory: a segment is missing, appears twice, belongs to a different trajectory, has the
            wrong length, or holds an invalid number.
    """
    if not segments:
        raise BrokenTrajectory("no segments: nothing to assemble")
    ordered = sorted(segments, key=lambda pair: pair[0].index)
    first, last = ordered[0][0], ordered[-1][0]
    _check_sequence([segment for segment, _ in ordered])
    for segment, arrays in ordered:
        _check_arrays(segment, arrays)
    joined = {name: np.concatenate([arrays[name] for _, arrays in ordered]) for name in TOKEN_ARRAYS}
    correct = last.extra.get("correct")
    trajectory = Trajectory(
        trajectory_id=first.trajectory_id,
        group_id=first.group_id,
        group_size=first.group_size,
        env=first.env,
        status=last.status,
        purpose=first.purpose,
        token_ids=joined["token_ids"].astype(np.int32),
        action_mask=joined["action_mask"].astype(np.bool_),
        logp_behaviour=joined["logp_behaviour"].astype(np.float32),
        policy_version=joined["policy_version"].astype(np.int32),
        turns=_join_turns([segment for segment, _ in ordered]),
        rewards=[reward for segment, _ in ordered for reward in segment.rewards],
        temperature=first.temperature,
        kv="kept" if any(segment.kv == "kept" for segment, _ in ordered) else "recomputed",
        correct=None if correct is None else bool(correct),
        error=last.error,
        failure=last.failure,
        stop_reason=last.stop_reason,
        auxiliary=last.auxiliary,
        marks=[mark for segment, _ in ordered for mark in segment.marks],
        hints=_hints_of(last),
    )
    _check_trajectory(trajectory)
    _check_counts(ordered)
    whole = _with_routes(trajectory, [arrays for _, arrays in ordered])
    if layers is not None and len(whole.routed_token):
        _check_choices(f"trajectory {whole.trajectory_id}", whole.routed_token, whole.routed_experts, layers)
    return whole


def _check_sequence(segments: Sequence[Segment]) -> None:
    """Check that the segments are of one trajectory, without gaps, and only the last may close it."""
    first = segments[0]
    offset = 0
    for expected, segment in enumerate(segments):
        name = f"trajectory {segment.trajectory_id}"
        if segment.trajectory_id != first.trajectory_id:
            raise BrokenTrajectory(f"{name}: mixed with segments of {first.trajectory_id}")
        if segment.index != expected:
            what = "appears twice" if segment.index < expected else "follows a gap"
            raise BrokenTrajectory(f"{name}: segment {segment.index} {what}, expected index {expected}")
        if segment.offset != offset:
            raise BrokenTrajectory(
                f"{name}: segment {expected} starts at token {segment.offset}, expected {offset}"
            )
        if segment.temperature != first.temperature:
            raise BrokenTrajectory(
                f"{name}: temperature {segment.temperature} in segment {expected}, {first.temperature} before"
            )
        if segment.status != "unfinished" and segment is not segments[-1]:
            raise BrokenTrajectory(f"{name}: segment {expected} is {segment.status}, but others follow it")
        offset += segment.tokens


def _check_arrays(segment: Segment, arrays: Arrays) -> None:
    where = f"trajectory {segment.trajectory_id}: segment {segment.index}"
    for name in TOKEN_ARRAYS:
        if name not in arrays:
            raise BrokenTrajectory(f"{where}: array {name!r} is missing, it has {sorted(arrays)}")
        if len(arrays[name]) != segment.tokens:
            raise BrokenTrajectory(
                f"{where}: {len(arrays[name])} elements in {name!r}, header says {segment.tokens}"
            )


def _check_trajectory(trajectory: Trajectory) -> None:
    """Check the numbers that could spoil a gradient."""
    name = f"trajectory {trajectory.trajectory_id}"
    mask = trajectory.action_mask
    if len(mask) and mask[0]:
        raise BrokenTrajectory(
            f"{name}: token 0 is an action token; a prompt of at least one token must precede it"
        )
    for start in starts_of(trajectory.turns, len(trajectory)):
        if mask[start]:
            raise BrokenTrajectory(
                f"{name}: a branch begins with token {start}, an action token; a prompt of at least one token must "
                "precede it"
            )
    if (bad := ~np.isfinite(trajectory.logp_behaviour)).any():
        at = int(bad.argmax())
        raise BrokenTrajectory(f"{name}: logp_behaviour is {trajectory.logp_behaviour[at]} at token {at}")
    if (bad := mask & (trajectory.logp_behaviour > 1e-3)).any():
        at = int(bad.argmax())
        raise BrokenTrajectory(
            f"{name}: logp_behaviour is {trajectory.logp_behaviour[at]} at token {at}; "
            "a log-probability is at most 0"
        )
    if (bad := mask & (trajectory.policy_version < 0)).any():
        raise BrokenTrajectory(f"{name}: action token {int(bad.argmax())} has no policy version")
    if (bad := trajectory.token_ids < 0).any():
        raise BrokenTrajectory(f"{name}: token id {trajectory.token_ids[int(bad.argmax())]} is negative")
    for reward in trajectory.rewards:
        if not np.isfinite(reward.value):
            raise BrokenTrajectory(f"{name}: reward {reward.name!r} of turn {reward.turn} is {reward.value}")
    for mark in trajectory.marks:
        if not isinstance(mark.value, str) and not np.isfinite(mark.value):
            raise BrokenTrajectory(f"{name}: mark {mark.name!r} of turn {mark.turn} is {mark.value}")
    if trajectory.temperature < 0 or not np.isfinite(trajectory.temperature):
        raise BrokenTrajectory(f"{name}: temperature is {trajectory.temperature}")


def _hints_of(last: Segment) -> list[str]:
    hints = last.extra.get("hints", [])
    if not isinstance(hints, list) or not all(isinstance(hint, str) for hint in hints):
        raise BrokenTrajectory(
            f"trajectory {last.trajectory_id}: hints are {hints!r:.200}, not a list of texts"
        )
    return hints


def _check_counts(segments: Sequence[SegmentArrays]) -> None:
    """Check the headers' counts of action tokens, because the ledgers of broker and learner rely on them."""
    for segment, arrays in segments:
        if (actions := int(np.count_nonzero(arrays["action_mask"]))) != segment.action_tokens:
            raise BrokenTrajectory(
                f"trajectory {segment.trajectory_id}: segment {segment.index} has {actions} action tokens, its "
                f"header says {segment.action_tokens}"
            )


def _with_routes(t: Trajectory, parts: Sequence[Arrays]) -> Trajectory:
    """Return a trajectory with the experts of its tokens; of several rows of a token, the first.

    Args:
        parts: arrays of the segments, in order.
    """
    found = [arrays for arrays in parts if len(arrays.get(ROUTED_TOKEN, ()))]
    if not found:
        return t
    name = f"trajectory {t.trajectory_id}"
    rows = [(arrays[ROUTED_TOKEN], arrays.get(ROUTED_EXPERTS, np.empty(0))) for arrays in found]
    widths = {len(experts) / len(token) for token, experts in rows}
    if len(widths) > 1 or not all(width and width.is_integer() for width in widths):
        raise BrokenTrajectory(
            f"{name}: rows of experts with {sorted(widths)} numbers; all must have as many"
        )
    token = np.concatenate([token for token, _ in rows])
    experts = np.concatenate([experts for _, experts in rows]).reshape(len(token), -1)
    if token.dtype.kind != "i" or experts.dtype.kind not in "iu":
        raise BrokenTrajectory(f"{name}: its experts are {experts.dtype}, and their tokens {token.dtype}")
    if token.min() < 0 or token.max() >= len(t) or experts.min() < 0:
        raise BrokenTrajectory(
            f"{name}: experts from {experts.min()} of tokens {token.min()} to {token.max()}, it has {len(t)} tokens"
        )
    known, first = np.unique(token, return_index=True)
    return replace(t, routed_token=known.astype(np.int32), routed_experts=experts[first].reshape(-1))


def _check_choices(name: str, token: NDArray[np.int32], experts: Experts, layers: RouteLayers) -> None:
    """Check that each token goes through different experts of a layer.

    Rows that do not fit the model pass: they are no damage, and the update ends the run, because generators and learner
    have different models.
    """
    width = len(experts) // len(token)
    if width % layers.chosen or width < (max(layers.layers) + 1) * layers.chosen:
        return
    rows = np.sort(experts.reshape(len(token), -1, layers.chosen)[:, list(layers.layers)], axis=2)
    if (bad := (rows[:, :, 1:] == rows[:, :, :-1]).any(axis=2)).any():
        row, layer = np.argwhere(bad)[0]
        raise BrokenTrajectory(
            f"{name}: token {token[row]} went through experts {rows[row, layer].tolist()} of layer "
            f"{layers.layers[layer]}, one of them twice"
        )


def _join_turns(segments: Sequence[Segment]) -> list[Turn]:
    """Return the turns in order; pieces of a turn that segment boundaries cut are joined."""
    turns: list[Turn] = []
    for segment in segments:
        for turn in segment.turns:
            if turns and turns[-1].index == turn.index:
                turns[-1] = msgspec.structs.replace(turns[-1], end=turn.end)
            else:
                turns.append(turn)
    return turns
