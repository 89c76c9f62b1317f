"""Conversations that were given, as trajectories: which of them a step gets, and how they look to an update. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from learner.selection import task_index
from learner.settings.learner import LearnerConfig
from learner.settings.selection import EpochsSelection
from learner.trajectory import Trajectory
from protocol.messages.episodes import Turn

GIVEN = "given"
"""First part of the names of given trajectories; no task has such a name."""


@dataclass(frozen=True, eq=False)
class Conversation:
    """A conversation that was given."""

    place: str
    """File and line, or task, for people."""
    token_ids: NDArray[np.int32]
    learnt: NDArray[np.bool_]
    """True on the tokens of answers, their end tokens included. The first token is never learnt."""


class GivenConversations:
    """Conversations of a run, dealt again and again. Each epoch has an order of its own.

    Args:
        conversations: at least one.
        batch: conversations of a learner step.
        seed: seed of the run, for the orders.

    Example:
        >>> talk = Conversation("a.jsonl:1", np.array([5, 6, 7], np.int32), np.array([False, True, True]))
        >>> given = GivenConversations([talk], batch=2, seed=0)
        >>> [t.trajectory_id for t in given.of_step(3)]
        ['given-3.0', 'given-3.1']
    """

    def __init__(self, conversations: Sequence[Conversation], *, batch: int, seed: int) -> None:
        self._conversations, self._batch, self._seed = conversations, batch, seed
        self._order = EpochsSelection(tasks=len(conversations))

    def of_step(self, step: int) -> list[Trajectory]:
        """Return the trajectories of a step. They depend on its number alone, so that a restart gets the same."""
        dealt = range(step * self._batch, (step + 1) * self._batch)
        chosen = (self._conversations[task_index(self._order, n, self._seed)] for n in dealt)
        return [as_trajectory(talk, f"{GIVEN}-{step}.{n}") for n, talk in enumerate(chosen)]


def given_conversations(
    config: LearnerConfig, read: Callable[[], Sequence[Conversation]], *, seed: int
) -> GivenConversations | None:
    """Return the conversations of a run; None if it has none.

    Args:
        read: reads those of ``config.given``. Only the rank that deals them needs the file.
    """
    if config.given is None:
        return None
    return GivenConversations(read(), batch=config.given_trajectories, seed=seed)


def as_trajectory(talk: Conversation, name: str) -> Trajectory:
    """Return a conversation as a finished trajectory. Nobody knows with which probability its answers were written."""
    learnt, tokens = talk.learnt, len(talk.token_ids)
    edges = [0, *(np.flatnonzero(learnt[1:] != learnt[:-1]) + 1).tolist(), tokens]
    turns = [Turn(n, start, end, bool(learnt[start])) for n, (start, end) in enumerate(pairwise(edges))]
    return Trajectory(
        trajectory_id=name,
        group_id=name,
        group_size=1,
        env=GIVEN,
        status="finished",
        purpose="train",
        origin="given",
        token_ids=talk.token_ids,
        action_mask=learnt,
        logp_behaviour=np.zeros(tokens, np.float32),
        policy_version=np.full(tokens, -1, np.int32),
        turns=turns,
    )
