"""Trajectories: what an episode left, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.branches import Branch, branches_of, ends_of
from protocol.arrays import Experts
from protocol.messages.episodes import Failure, Reward, Turn, TurnMark
from protocol.messages.fields import KvPolicy, Purpose, TrajectoryStatus


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
