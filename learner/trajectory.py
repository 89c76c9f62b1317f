"""Trajectories, assembled from the segments that an actor streamed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from learner.branches import Branch, branches_of, ends_of, starts_of
from learner.errors import BrokenTrajectory
from protocol.arrays import TOKEN_ARRAYS, Arrays, SegmentArrays
from protocol.messages import Failure, KvPolicy, Purpose, Reward, Segment, TrajectoryStatus, Turn, TurnMark


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode, or the part of it that has been streamed. Arrays have one element per token."""

    trajectory_id: str
    group_id: str
    group_size: int
    env: str
    status: TrajectoryStatus
    purpose: Purpose
    token_ids: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    """True on action tokens, which the policy sampled."""
    logp_behaviour: NDArray[np.float32]
    """Log-probability under the behaviour policy, in nats, temperature included; 0 on observation tokens."""
    policy_version: NDArray[np.int32]
    """Version that sampled the token; -1 on observation tokens."""
    turns: list[Turn] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)
    """Rewards as `[learner.reward]` composes them: what the policy is trained on."""
    given_rewards: list[Reward] | None = None
    """Rewards as the environment gave them, if `rewards` differ from them."""
    temperature: float = 1.0
    kv: KvPolicy = "recomputed"
    correct: bool | None = None
    """True if the task was solved exactly; None if the environment does not tell."""
    error: str = ""
    failure: Failure | None = None
    """Why the episode failed, if the actor says it."""
    window_start: int = 0
    """First token of the present window; tokens before it are context and were trained in earlier windows."""
    replayed: bool = False
    """True if the trajectory comes from the replay table."""
    advantage: float | None = None
    """Advantage of a replayed trajectory; None: it is computed from the group."""
    stop_reason: str = ""
    """Why the last turn ended, in the actor's words."""
    auxiliary: list[int] = field(default_factory=list)
    """Indices of action turns that the environment wants left out of training."""
    marks: list[TurnMark] = field(default_factory=list)
    """Facts about turns by name, which the environment gave, for example the state that a turn acted in."""
    hints: list[str] = field(default_factory=list)
    """Texts that help to solve the task, from the weakest to the strongest, if the environment gives them."""
    parent: str = ""
    """Trajectory from which the beginning of this one was taken; "" if it began from its prompt."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def return_(self) -> float:
        """Sum of all rewards, as they are trained on."""
        return float(sum(reward.value for reward in self.rewards))

    @property
    def reward_by_name(self) -> dict[str, float]:
        """Sum of the rewards of each name as the environment gave them."""
        totals: dict[str, float] = {}
        for reward in self.rewards if self.given_rewards is None else self.given_rewards:
            totals[reward.name] = totals.get(reward.name, 0.0) + reward.value
        return totals

    @property
    def learned_mask(self) -> NDArray[np.bool_]:
        """True on action tokens of turns that are not auxiliary, [T]."""
        if not self.auxiliary:
            return self.action_mask
        return self.action_mask & ~np.isin(self.action_turn_index(), self.auxiliary)

    def branches(self) -> list[Branch]:
        """Return the branches; most trajectories have one."""
        return branches_of(self.turns, len(self))

    @property
    def branch_count(self) -> int:
        """Number of branches."""
        return max(1, len(ends_of(self.turns)))

    @property
    def action_tokens(self) -> int:
        """Number of action tokens."""
        return int(self.action_mask.sum())

    @property
    def window_tokens(self) -> int:
        """Number of action tokens in the present window."""
        return int(self.action_mask[self.window_start :].sum())

    @property
    def baseline(self) -> bool:
        """Whether it is a greedy baseline for its group; it has no behaviour distribution."""
        return self.temperature == 0 and self.purpose == "train"

    @property
    def action_turns(self) -> int:
        """Number of turns in which the policy acted, without auxiliary ones."""
        return len(self.action_turn_indices)

    @property
    def action_turn_indices(self) -> list[int]:
        """Indices of the turns in which the policy acted, in order, without auxiliary ones."""
        return sorted({turn.index for turn in self.turns if turn.action} - set(self.auxiliary))

    @property
    def anchors(self) -> dict[int, str | float]:
        """TurnMark `anchor` of each turn that has one: the state that the turn acted in."""
        return {mark.turn: mark.value for mark in self.marks if mark.name == "anchor"}

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the first action token, or of all tokens if there is none."""
        return int(self.action_mask.argmax()) if self.action_mask.any() else len(self)

    @property
    def turn_rewards(self) -> dict[int, float]:
        """Sum of rewards by turn index; turns without a reward are left out."""
        totals: dict[int, float] = {}
        for reward in self.rewards:
            totals[reward.turn] = totals.get(reward.turn, 0.0) + reward.value
        return totals

    def action_turn_index(self) -> NDArray[np.int32]:
        """Return the index of each token's turn, [T]; -1 for tokens outside every turn."""
        index = np.full(len(self), -1, dtype=np.int32)
        for turn in self.turns:
            index[turn.start : turn.end] = turn.index
        return index

    def reward_per_token(self) -> NDArray[np.float64]:
        """Return rewards by token, [T].

        A reward is put on the last action token of its turn. If the turn has none, or is auxiliary, the token is the
        last action token before it, or the first of the trajectory if there is none before it.
        """
        rewards = np.zeros(len(self))
        places = np.flatnonzero(self.learned_mask)
        if not len(places):
            return rewards
        turns = self.action_turn_index()[places]
        for reward in self.rewards:
            until = int(np.searchsorted(turns, reward.turn, side="right"))
            rewards[places[max(0, until - 1)]] += reward.value
        return rewards


def assemble(segments: Sequence[SegmentArrays]) -> Trajectory:
    """Join the segments of one trajectory, given in any order.

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
    return trajectory


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
