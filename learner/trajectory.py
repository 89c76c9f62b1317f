"""The learner's nouns of rollouts: branches of a conversation, trajectories, and units of a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.errors import BrokenTrajectory
from protocol.arrays import Experts, Int64s
from protocol.messages.episodes import Failure, Reward, Turn, TurnMark
from protocol.messages.fields import KvPolicy, Purpose, TrajectoryStatus

MAX_TOKENS = 2**25
"""Upper limit of the tokens of all branches of a trajectory, shared ones counted for each."""


@dataclass(frozen=True, eq=False)
class Branch:
    """One conversation of a trajectory."""

    places: Int64s
    """Index in the trajectory of each token of the branch, [L]."""
    own: NDArray[np.bool_]
    """True if no earlier branch has the token, [L]. It is trained in this branch."""


def branches_of(turns: Sequence[Turn], tokens: int) -> list[Branch]:
    """Return the branches in the order of their last turns.

    Args:
        turns: turns of the trajectory, in order.
        tokens: number of its tokens.

    Raises:
        BrokenTrajectory: turns that branch do not hold every token once, or one continues a turn that is not there.

    Example:
        >>> turns = [Turn(0, 0, 2, False), Turn(1, 2, 3, True), Turn(2, 3, 4, False), Turn(3, 4, 5, True),
        ...     Turn(4, 5, 6, False, back=3), Turn(5, 6, 7, True)]
        >>> [branch.places.tolist() for branch in branches_of(turns, 7)]
        [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]
        >>> [branch.own.astype(int).tolist() for branch in branches_of(turns, 7)]
        [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]
    """
    if all(turn.back == 1 for turn in turns):
        return [Branch(np.arange(tokens), np.ones(tokens, dtype=np.bool_))]
    _check(turns, tokens)
    before, ends = turns_before(turns), ends_of(turns)
    _lengths(turns, before, ends)
    span = {turn.index: np.arange(turn.start, turn.end) for turn in turns}
    known: set[int] = set()
    branches = []
    for end in ends:
        way: list[int] = []
        at: int | None = end
        while at is not None:
            way.append(at)
            at = before[at]
        way.reverse()
        own = [np.full(len(span[index]), index not in known) for index in way]
        branches.append(Branch(np.concatenate([span[index] for index in way]), np.concatenate(own)))
        known.update(way)
    return branches


def ends_of(turns: Sequence[Turn]) -> list[int]:
    """Return the index of the last turn of each branch.

    Example:
        >>> turns = [Turn(0, 0, 2, False), Turn(1, 2, 3, True), Turn(2, 3, 4, False, back=0), Turn(3, 4, 5, True)]
        >>> ends_of(turns)
        [1, 3]
    """
    continued = set(turns_before(turns).values())
    return [turn.index for turn in turns if turn.index not in continued]


def starts_of(turns: Sequence[Turn], tokens: int) -> list[int]:
    """Return the index of the first token of each tree, and check the turns as `branches_of` does, without its arrays.

    Raises:
        BrokenTrajectory: see `branches_of`.

    Example:
        >>> starts_of([Turn(0, 0, 2, False), Turn(1, 2, 3, True), Turn(2, 3, 4, False, back=0)], 4)
        [0, 3]
    """
    if all(turn.back == 1 for turn in turns):
        return [0] if tokens else []
    _check(turns, tokens)
    before = turns_before(turns)
    lengths = _lengths(turns, before, ends_of(turns))
    return [t.start for t in turns if not lengths[before[t.index]] and t.end > t.start]


def turns_before(turns: Sequence[Turn]) -> dict[int, int | None]:
    """Return by index the turn that each turn continues; None: it begins a tree.

    Example:
        >>> turns_before([Turn(0, 0, 2, False), Turn(1, 2, 3, True), Turn(2, 3, 4, True, 2), Turn(3, 4, 5, True, 0)])
        {0: None, 1: 0, 2: 0, 3: None}
    """
    return {turn.index: turn.index - turn.back if turn.back and turn.index else None for turn in turns}


def _lengths(
    turns: Sequence[Turn], before: Mapping[int, int | None], ends: Sequence[int]
) -> dict[int | None, int]:
    """Return the number of tokens from the beginning of a tree to the end of each turn.

    Raises:
        BrokenTrajectory: all branches together are too long.
    """
    lengths: dict[int | None, int] = {None: 0}
    for turn in turns:
        lengths[turn.index] = lengths[before[turn.index]] + turn.end - turn.start
    if (total := sum(lengths[end] for end in ends)) > MAX_TOKENS:
        raise BrokenTrajectory(f"{len(ends)} branches have {total} tokens in all, at most {MAX_TOKENS}")
    return lengths


def _check(turns: Sequence[Turn], tokens: int) -> None:
    at = 0
    for number, turn in enumerate(turns):
        if (turn.index, turn.start) != (number, at) or turn.end < at or turn.back > max(number, 1):
            raise BrokenTrajectory(
                f"turn {turn.index} at [{turn.start}, {turn.end}), {turn.back} back, does not fit: it should be turn "
                f"{number} and begin at token {at}"
            )
        at = turn.end
    if at != tokens:
        raise BrokenTrajectory(f"the turns end at token {at}, the trajectory at {tokens}")


Origin = Literal["own", "replayed", "guided", "taught", "given"]
"""How a trajectory came into a batch. "own": sampled for it by a version of the policy; "replayed": sampled for an
earlier one, see `learner.replay`; "guided": sampled behind a note, and trained behind the prompt without it;
"taught": written by another policy, and valued by the environment; "given": a conversation of `learner.given`."""
FOREIGN: tuple[Origin, ...] = ("taught", "given")
"""Origins of tokens that the policy did not write, so that they have no behaviour probability and no version."""


def is_right(return_: float, correct: bool | None, above: float = 0.0) -> bool:
    """Return whether an answer is a success: as the environment says it, or else by its return.

    Args:
        return_: sum of the rewards.
        correct: what the environment says; None: it does not tell.
        above: bound of the return of a success, which lies above it.

    Example:
        >>> is_right(0.0, True), is_right(1.0, False), is_right(0.5, None), is_right(0.5, None, above=0.5)
        (True, False, True, False)
    """
    return return_ > above if correct is None else correct


class RouteLayers(NamedTuple):
    """The layers of the learner's model that choose experts."""

    layers: Sequence[int]
    """Their numbers in the whole model."""
    chosen: int
    """Experts that a token goes through in each."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode, or the part of it that has been streamed. Arrays have one element per token, or say more."""

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
    routed_token: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Tokens whose experts in the generator are known, each once, [n]; see `protocol.arrays`."""
    routed_experts: Experts = field(default_factory=lambda: np.empty(0, np.uint8))
    """Their experts in all layers, row behind row, [n * width]."""
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
    origin: Origin = "own"
    lane: bool = False
    """True if it was sampled at another temperature than its group, see `learner.lane`. Its behaviour log-probabilities
    are those at its own temperature, and it is trained at 1."""
    advantage: float | None = None
    """Advantage of a replayed trajectory, or of one in a lane; None: it is computed from the group."""
    stop_reason: str = ""
    """Why the last turn ended, in the actor's words."""
    auxiliary: list[int] = field(default_factory=list)
    """Indices of action turns that the environment wants left out of training."""
    marks: list[TurnMark] = field(default_factory=list)
    """Facts about turns by name, which the environment gave, for example the state that a turn acted in."""
    hints: list[str] = field(default_factory=list)
    """Texts that help to solve the task, from the weakest to the strongest, if the environment gives them."""
    answer: str | None = None
    """What the environment found in the model's text and compared; None if it does not tell. For people."""
    target: str | None = None
    """What the answer should have been."""
    seconds: float | None = None
    """Seconds that it took in the actor, waits and tools included; None: the actor does not measure them."""
    moved: int = 0
    """By how many tokens all behind the first prompt stand further on than where they were sampled, because another
    prompt took the place of theirs; negative: further to the front."""
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
    def replayed(self) -> bool:
        """Whether the trajectory comes from the replay table."""
        return self.origin == "replayed"

    @property
    def solved(self) -> bool:
        """Whether the answer is right: as the environment says, or by a return above 0 where it says nothing."""
        return is_right(self.return_, self.correct)

    @property
    def baseline(self) -> bool:
        """Whether it is a greedy baseline for its group; it has no behaviour distribution."""
        return self.temperature == 0 and self.purpose == "train"

    @property
    def unused(self) -> bool:
        """Whether no token of it is trained, however fresh: a greedy baseline, or a wrong answer of a lane."""
        return self.baseline or (self.lane and not self.advantage)

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


MAX_NEWEST = 16_384
"""Most ids of trajectories without gradient that are remembered from one step to the next."""
UNTAUGHT = "untaught"
"""Outcome of teachers' answers that are wrong; no policy of the run has sampled them."""
RECOMMITTED = "recommitted"
"""Outcome of units that the broker delivered again after they had been committed."""


@dataclass(frozen=True)
class UnitPart:
    """One delivery of the broker as a part of a unit: what of it is trained, and why the rest is not."""

    unit_id: str
    trained: Sequence[Trajectory]
    dropped: Mapping[str, Sequence[Trajectory]] = field(default_factory=dict)
    """Trajectories that are not trained, by outcome."""

    @property
    def trained_tokens(self) -> int:
        """Action tokens of the trajectories that are trained."""
        return sum(t.window_tokens for t in self.trained)

    @property
    def tokens(self) -> int:
        """Action tokens of all trajectories."""
        return self.trained_tokens + sum(t.window_tokens for ts in self.dropped.values() for t in ts)


@dataclass(frozen=True)
class Unit:
    """Unit that is trained as a whole: a rollout group, a family of groups, a trajectory, or a window of a trajectory.

    All but a family are one delivery of the broker.
    """

    unit_id: str
    group_id: str
    trajectories: list[Trajectory]
    deliveries: tuple[UnitPart, ...] | None = None
    """Deliveries of a family; None if the unit is one delivery."""
    proposals: tuple[str | None, ...] = ()
    """Instructions that a family of kind "propose" brings; None for one that cannot be read."""

    @property
    def parts(self) -> tuple[UnitPart, ...]:
        """Deliveries of the unit."""
        return (UnitPart(self.unit_id, self.trajectories),) if self.deliveries is None else self.deliveries

    @property
    def tokens(self) -> int:
        """Action tokens of all deliveries of the unit; of a window, the tokens of the window only."""
        return sum(part.tokens for part in self.parts)


@dataclass
class Counts:
    """Numbers of trajectories and of action tokens by outcome, of everything that was not trained."""

    trajectories: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    newest: list[tuple[str, str]] = field(default_factory=list)
    """Outcome and id of training trajectories that were counted since the last `take_newest`, for the annotations."""

    def add(self, outcome: str, trajectories: Sequence[Trajectory]) -> None:
        """Count trajectories, and the action tokens of their windows, under an outcome."""
        if trajectories:
            self.note(outcome, len(trajectories), sum(t.window_tokens for t in trajectories))
            untrained = [(outcome, t.trajectory_id) for t in trajectories if t.purpose == "train"]
            self.newest += untrained[: MAX_NEWEST - len(self.newest)]

    def take_newest(self) -> dict[str, list[str]]:
        """Return and forget the ids of the trajectories that were counted, by outcome: the first `MAX_NEWEST`."""
        taken: dict[str, list[str]] = {}
        for outcome, trajectory_id in self.newest:
            taken.setdefault(outcome, []).append(trajectory_id)
        self.newest = []
        return taken

    def note(self, outcome: str, trajectories: int, tokens: int = 0) -> None:
        """Count trajectories that were never assembled here, and the action tokens that did arrive."""
        if trajectories:
            self.trajectories[outcome] = self.trajectories.get(outcome, 0) + trajectories
        if tokens:
            self.tokens[outcome] = self.tokens.get(outcome, 0) + tokens

    def total(self, *outcomes: str) -> int:
        """Return the number of trajectories with one of these outcomes."""
        return sum(self.trajectories.get(outcome, 0) for outcome in outcomes)

    @property
    def arrived_tokens(self) -> int:
        """Action tokens of generators that arrived and were not trained; tokens that arrived twice count once."""
        return sum(self.tokens.values()) - self.tokens.get(RECOMMITTED, 0) - self.tokens.get(UNTAUGHT, 0)


def newest_version(trajectories: Sequence[Trajectory]) -> int:
    """Return the policy version of the newest token in the windows."""
    return max(int(t.policy_version[t.window_start :].max(initial=-1)) for t in trajectories)
