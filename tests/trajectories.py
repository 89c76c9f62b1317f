"""Artificial trajectories for tests of the learner."""

from dataclasses import replace
from typing import Any

import numpy as np

from learner.advantages import TokenAdvantages
from learner.trajectory import Trajectory
from learner.update.batch import Batch, make_batch
from protocol.messages.episodes import Reward, Turn, TurnMark

VOCABULARY = 48


def make_trajectory(
    name: str,
    *,
    group: str = "g0",
    prompt: int = 4,
    actions: int = 5,
    reward: float = 0.0,
    version: int | list[int] = 0,
    logp: float | np.ndarray = -3.0,
    temperature: float = 1.0,
    seed: int = 0,
    observation: tuple[int, int] | None = None,
    **changes: Any,
) -> Trajectory:
    """Return a prompt and action tokens; ``observation`` = (start, end) makes this range an observation.

    ``changes`` are other fields of the trajectory.
    """
    rng = np.random.default_rng([seed, *name.encode()])
    total = prompt + actions
    mask = np.arange(total) >= prompt
    if observation:
        mask[observation[0] : observation[1]] = False
    versions = np.full(total, -1, dtype=np.int32)
    versions[mask] = version
    behaviour = np.zeros(total, dtype=np.float32)
    behaviour[mask] = logp
    made = Trajectory(
        trajectory_id=name,
        group_id=group,
        group_size=4,
        env="made up",
        status="finished",
        purpose="train",
        token_ids=rng.integers(0, VOCABULARY, total).astype(np.int32),
        action_mask=mask,
        logp_behaviour=behaviour,
        policy_version=versions,
        turns=[Turn(0, 0, prompt, False), Turn(1, prompt, total, True)],
        rewards=[Reward("score", 1, reward)],
        temperature=temperature,
    )
    return replace(made, **changes)


def with_routes(t: Trajectory, layers: int = 2, chosen: int = 2, experts: int = 4) -> Trajectory:
    """Return a trajectory with random experts of all tokens but each fifth and the last."""
    rng = np.random.default_rng([11, *t.trajectory_id.encode()])
    known = np.array([i for i in range(len(t) - 1) if i % 5 != 4], np.int32)
    rows = [rng.permutation(experts)[:chosen] for _ in range(len(known) * layers)]
    return replace(t, routed_token=known, routed_experts=np.concatenate(rows).astype(np.uint8))


def make_group(
    group: str,
    rewards: list[float],
    *,
    lengths: list[int] | None = None,
    spread: float = 0.5,
    version: int = 0,
) -> list[Trajectory]:
    """Return one trajectory for each reward, with behaviour log-probabilities around -log V."""
    rng = np.random.default_rng([7, *group.encode()])
    lengths = lengths or [int(rng.integers(3, 9)) for _ in rewards]
    return [
        make_trajectory(
            f"{group}.{i}",
            group=group,
            prompt=int(rng.integers(2, 6)),
            actions=length,
            reward=reward,
            version=version,
            logp=np.minimum(-np.log(VOCABULARY) + spread * rng.standard_normal(length), -0.01),
        )
        for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]


def make_batch_of_groups(groups: int = 3, size: int = 4, version: int = 0) -> list[Trajectory]:
    """Return groups with different returns and unequal lengths."""
    rng = np.random.default_rng(3)
    return [
        trajectory
        for g in range(groups)
        for trajectory in make_group(f"g{g}", rng.random(size).round(3).tolist(), version=version)
    ]


def batch_of(trajectories: list[Trajectory], advantages: np.ndarray | None = None, **bounds: int) -> Batch:
    """Return a batch in which all tokens of a trajectory share one advantage, 0 unless given."""
    values = np.zeros(len(trajectories)) if advantages is None else np.asarray(advantages, dtype=float)
    credit = TokenAdvantages.of_trajectories(values, values, trajectories)
    return make_batch(trajectories, credit, **{"current_version": 0, "max_policy_lag": 0} | bounds)


def make_turns(
    name: str,
    rewards: list[dict[str, float]],
    *,
    group: str = "g0",
    anchors: list[str] | None = None,
    lengths: list[int] | None = None,
    **changes: Any,
) -> Trajectory:
    """Return a prompt of two tokens, and for each dict an action turn with these rewards.

    Observations of one token stand between. ``anchors`` are the marks of the turns, ``lengths`` their tokens.
    """
    lengths = lengths or [2] * len(rewards)
    turns, end = [Turn(0, 0, 2, False)], 2
    for k, length in enumerate(lengths):
        turns.append(Turn(2 * k + 1, end, end + length, True))
        end += length
        if k + 1 < len(lengths):
            turns.append(Turn(2 * k + 2, end, end + 1, False))
            end += 1
    made = make_trajectory(name, group=group, prompt=2, actions=end - 2)
    mask = np.zeros(end, dtype=np.bool_)
    for turn in turns:
        mask[turn.start : turn.end] = turn.action
    own = [Reward(word, 2 * k + 1, value) for k, named in enumerate(rewards) for word, value in named.items()]
    marks = [TurnMark("anchor", 2 * k + 1, anchor) for k, anchor in enumerate(anchors or [])]
    return replace(
        made,
        turns=turns,
        rewards=own,
        marks=marks,
        action_mask=mask,
        logp_behaviour=np.where(mask, made.logp_behaviour, 0).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        **changes,
    )
