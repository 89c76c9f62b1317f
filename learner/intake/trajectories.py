"""Puts segments together to trajectories, whole or window by window, and composes their rewards. Pure."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from learner.errors import BrokenTrajectory, OpenStateError
from learner.rewards import as_given, composed, updates_at
from learner.settings.advantages import RewardConfig
from learner.settings.learner import LearnerConfig
from learner.trajectory import Counts, RouteLayers, Trajectory, is_right, newest_version, starts_of
from protocol import names
from protocol.arrays import ROUTED_EXPERTS, ROUTED_TOKEN, TOKEN_ARRAYS, Arrays, Experts, SegmentArrays
from protocol.codec import decode_segment, encode_arrays, unpack_arrays
from protocol.errors import ProtocolError
from protocol.messages.episodes import Segment, Turn
from protocol.version_line import VersionLine

log = logging.getLogger(__name__)


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
        answer=_text_of(last, "answer"),
        target=_text_of(last, "target"),
        seconds=_seconds_of([segment for segment, _ in ordered]),
        origin="taught" if first.policy else "own",
    )
    _check_trajectory(trajectory)
    _check_counts(ordered)
    whole = _with_routes(trajectory, [arrays for _, arrays in ordered])
    if layers is not None and len(whole.routed_token):
        _check_choices(f"trajectory {whole.trajectory_id}", whole.routed_token, whole.routed_experts, layers)
    return whole


def _seconds_of(segments: Sequence[Segment]) -> float | None:
    times = [time for segment in segments for time in segment.times]
    return sum(time.waited + time.sampled + time.tools for time in times) if times else None


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
        if segment.policy != first.policy:
            raise BrokenTrajectory(
                f"{name}: policy {segment.policy!r} in segment {expected}, {first.policy!r} before"
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
    taught = trajectory.origin == "taught"
    if (bad := mask & ((trajectory.policy_version < 0) != taught)).any():
        has = "a" if taught else "no"
        raise BrokenTrajectory(f"{name}: action token {int(bad.argmax())} has {has} policy version")
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


def _text_of(last: Segment, name: str) -> str | None:
    """Return a text for people, which no training depends on; None if there is none."""
    text = last.extra.get(name)
    return text if isinstance(text, str) else None


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


def trajectories_of(
    segments: Sequence[SegmentArrays],
    line: VersionLine,
    counts: Counts,
    layers: RouteLayers | None = None,
) -> list[Trajectory]:
    """Assemble the trajectories of a unit. A broken one is counted and left out; its group stays.

    Args:
        layers: see `learner.intake.trajectories.assemble`.
    """
    by_id: dict[str, list[SegmentArrays]] = {}
    for part in segments:
        by_id.setdefault(part.segment.trajectory_id, []).append(part)
    trajectories = []
    for pieces in by_id.values():
        try:
            trajectories.append(place_on_line(assemble(pieces, layers), line))
        except BrokenTrajectory as error:
            log.error("trajectory rejected: %s", error)
            counts.note("rejected", 1, sum(segment.action_tokens for segment, _ in pieces))
    return trajectories


def place_on_line(trajectory: Trajectory, line: VersionLine) -> Trajectory:
    """Replace versions of undone steps by those of the newest line.

    The new versions have equal lag, so all later code gets the policy lag by subtracting version numbers.
    """
    return replace(trajectory, policy_version=line.placed(trajectory.policy_version))


def compose_rewards(
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
        usable = iter(compose_at_version(line, config, [t for t in trajectories if is_usable(t)]))
        return [next(usable) if is_usable(t) else t for t in trajectories]
    return [each for t in trajectories for each in compose_at_version(line, config, [t], group=False)]


def compose_at_version(
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


def in_lane(config: LearnerConfig, members: Sequence[Trajectory]) -> list[Trajectory]:
    """Mark the members of a group that were sampled in its lane, each with its advantage: right answers alone have one.

    A restart or a replay finds the lane again by the temperature that is recorded, whatever was measured meanwhile.
    """
    lane = config.lane
    if lane is None:
        return list(members)
    plain = (0.0, config.sampling.temperature)
    return [
        t
        if t.temperature in plain
        else replace(t, lane=True, advantage=lane.coefficient * is_right(t.return_, t.correct))
        for t in members
    ]


State = Literal["open", "broken", "ended"]


class StoredAttempt(Struct, frozen=True, array_like=True):
    """An attempt in a checkpoint; each segment is a header and a body, as on the wire."""

    task_id: str
    number: int
    state: State
    pieces: list[tuple[bytes, bytes]]


_decoder = msgspec.msgpack.Decoder(list[StoredAttempt])


@dataclass
class _Attempt:
    """The newest attempt at a task, with its segments so far; a broken attempt keeps none."""

    number: int
    pieces: list[SegmentArrays] = field(default_factory=list)
    state: State = "open"

    def knows(self, pieces: Sequence[SegmentArrays]) -> bool:
        """Return whether the attempt already has these segments."""
        start = pieces[0][0].index
        own = self.pieces[start : start + len(pieces)]
        return len(own) == len(pieces) and all(map(_equal, own, pieces))


@dataclass
class OpenTrajectories:
    """Segments of every trajectory that has begun and whose last window is not yet trained or dropped, by
    task.

    They are kept until `forget`. A checkpoint may be written while windows still wait; after a restart the
    broker delivers those windows again, and they need the segments before them. At most the segments of one
    trajectory are kept for each task.
    """

    _attempts: dict[str, _Attempt] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of trajectories that have begun and not ended."""
        return sum(bool(a.pieces) and a.state == "open" for a in self._attempts.values())

    @property
    def tokens(self) -> int:
        """Number of tokens of all kept segments."""
        pieces = (piece for attempt in self._attempts.values() for piece in attempt.pieces)
        return sum(segment.tokens for segment, _ in pieces)

    def begun_anew(self, pieces: Sequence[SegmentArrays]) -> bool:
        """Return whether the segments belong to a second run of an attempt of which the first run is here.

        That happens when the broker has lost its journal and counts attempts from 0 again.
        """
        first = pieces[0][0]
        before = self._attempts.get(first.task_id)
        if before is None or before.state != "open" or before.number != _number(first):
            return False
        return bool(before.pieces) and not before.knows(pieces)

    def displaced_by(self, pieces: Sequence[SegmentArrays]) -> bool:
        """Remove the earlier attempt if the segments begin a new one; return whether it had segments and no
        end."""
        first = pieces[0][0]
        before = self._attempts.get(first.task_id)
        if before is None or _number(first) < before.number:
            return False
        if _number(first) == before.number and not (first.index == 0 and self.begun_anew(pieces)):
            return False
        del self._attempts[first.task_id]
        return bool(before.pieces) and before.state == "open"

    def extend(self, pieces: Sequence[SegmentArrays], layers: RouteLayers | None = None) -> Trajectory | None:
        """Add the next segments, unless they are here already.

        Args:
            layers: see `learner.intake.trajectories.assemble`.

        Returns:
            The trajectory up to and including these segments, which are its window. None if they belong to an
            earlier, ended or broken attempt.

        Raises:
            BrokenTrajectory: earlier segments are missing, or these do not fit; the attempt's segments are
                removed.
        """
        first, last = pieces[0][0], pieces[-1][0]
        attempt = self._attempts.setdefault(first.task_id, _Attempt(_number(first)))
        if _number(first) < attempt.number or attempt.state == "broken":
            return None
        known = attempt.knows(pieces)
        if attempt.state == "ended" and not known:
            return None
        whole = attempt.pieces[: first.index + len(pieces)] if known else [*attempt.pieces, *pieces]
        try:
            trajectory = replace(assemble(whole, layers), window_start=first.offset)
        except BrokenTrajectory:
            attempt.pieces, attempt.state = [], "broken"
            raise
        if not known:
            attempt.pieces, attempt.state = whole, "open" if last.status == "unfinished" else "ended"
        return trajectory

    def ended(self, task_id: str) -> bool:
        """Return whether the last segment of the task's trajectory is here."""
        attempt = self._attempts.get(task_id)
        return attempt is not None and attempt.state == "ended"

    def forget(self, task_id: str) -> None:
        """Remove the segments of a task, of which nothing more will come."""
        self._attempts.pop(task_id, None)

    def encode(self) -> bytes:
        """Return all attempts as bytes for the checkpoint."""
        return msgspec.msgpack.encode(
            [
                StoredAttempt(task_id, attempt.number, attempt.state, [_stored(*p) for p in attempt.pieces])
                for task_id, attempt in self._attempts.items()
            ]
        )

    def restore(self, data: bytes) -> None:
        """Restore the attempts that `encode` returned.

        Raises:
            OpenStateError: the data cannot be read.
        """
        try:
            stored = _decoder.decode(data)
            attempts = {
                a.task_id: _Attempt(a.number, [_piece(*p) for p in a.pieces], a.state) for a in stored
            }
        except (msgspec.MsgspecError, ProtocolError) as error:
            raise OpenStateError(
                f"open trajectories of a checkpoint: {error}; delete their file to go on without them, "
                "which breaks the trajectories that are under way"
            ) from None
        self._attempts = attempts


def _number(segment: Segment) -> int:
    """Return the number of the attempt, which is at the end of the trajectory id."""
    return names.attempt_of(segment.trajectory_id)


def _equal(one: SegmentArrays, other: SegmentArrays) -> bool:
    """Return whether two segments are equal, apart from the layout of their bodies."""
    heads = [msgspec.structs.replace(segment, arrays=[]) for segment, _ in (one, other)]
    arrays, others = one[1], other[1]
    same = heads[0] == heads[1] and arrays.keys() == others.keys()
    return same and all(np.array_equal(arrays[name], others[name]) for name in arrays)


def _stored(segment: Segment, arrays: Arrays) -> tuple[bytes, bytes]:
    _, header, body = encode_arrays(segment, arrays)
    return bytes(header), bytes(body)


def _piece(header: bytes, body: bytes) -> SegmentArrays:
    segment = decode_segment(header)
    return SegmentArrays(segment, unpack_arrays(segment.arrays, body))
