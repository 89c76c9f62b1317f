"""Conversations that were given, as trajectories: which of them a step gets, and how they look to an update. Pure.

Given ones are a share of each batch. Taught ones replace members of groups that nobody solved (AMPO, arXiv:2510.02227).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from learner.selection import task_index
from learner.settings.families import TaughtFamily
from learner.settings.learner import LearnerConfig
from learner.settings.selection import EpochsSelection
from learner.settings.taught import TaughtConfig
from learner.trajectory import Trajectory, Unit
from protocol.messages.episodes import Reward, Turn

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


TAUGHT = "taught"
"""First part of the names of taught trajectories, and the name of their reward."""
Likelihood = Callable[[Sequence[Trajectory]], Sequence[float]]
"""Returns the mean log-probability, in nats, that the policy gives to the action tokens of each trajectory."""


class TaughtAnswers:
    """Answers of teachers, by the tokens of the prompt that they answer.

    Args:
        config: settings.
        conversations: answers that are right.

    Example:
        >>> talk = Conversation("a.jsonl:1", np.array([5, 6, 7], np.int32), np.array([False, True, True]))
        >>> len(TaughtAnswers(TaughtConfig(), [talk, talk]))
        1
    """

    def __init__(self, config: TaughtConfig, conversations: Sequence[Conversation]) -> None:
        self._config = config
        self._answers: dict[bytes, dict[bytes, Trajectory]] = {}
        for talk in conversations:
            t = as_trajectory(talk, talk.place)
            self._answers.setdefault(_prompt(t), {})[t.token_ids.tobytes()] = t

    def __len__(self) -> int:
        """Return the number of prompts with an answer."""
        return len(self._answers)

    def can_teach(self, group: Sequence[Trajectory]) -> bool:
        """Return whether nobody solved the task, and a teacher has answered it."""
        return bool(group) and not any(t.solved for t in group) and _prompt(group[0]) in self._answers

    def teach(self, units: Sequence[Unit], likelihood: Likelihood) -> list[Trajectory]:
        """Return the trajectories of a batch, with taught answers in groups that nobody solved.

        A pure function of the units and the policy, so that a restart and `offbeat retrain` choose the same answers.
        """
        offered = [self._offered(unit) if self.can_teach(unit.trajectories) else [] for unit in units]
        return replaced([unit.trajectories for unit in units], offered, self._config.members, likelihood)

    def _offered(self, unit: Unit) -> list[Trajectory]:
        """Return the answers to a unit's prompt, as members of its group."""
        first = unit.trajectories[0]
        return [
            replace(
                t,
                trajectory_id=f"{TAUGHT}-{unit.group_id}.{n}",
                group_id=first.group_id,
                group_size=first.group_size,
                origin="taught",
                rewards=[Reward(TAUGHT, t.turns[-1].index, self._config.value)],
                correct=True,
            )
            for n, t in enumerate(self._answers[_prompt(first)].values())
        ]


class TaughtMembers:
    """Right answers of live teachers, which came with the groups that nobody solved: see `learner.families.teaching`.

    Args:
        members: most members of a group that are replaced.
    """

    def __init__(self, members: int) -> None:
        self._members = members

    def teach(self, units: Sequence[Unit], likelihood: Likelihood) -> list[Trajectory]:
        """Return the trajectories of a batch, in each group at most so many of the answers, the likeliest first."""
        groups = [[t for t in unit.trajectories if t.origin != TAUGHT] for unit in units]
        offered = [[t for t in unit.trajectories if t.origin == TAUGHT] for unit in units]
        return replaced(groups, offered, self._members, likelihood)


def replaced(
    groups: Sequence[Sequence[Trajectory]],
    offered: Sequence[Sequence[Trajectory]],
    members: int,
    likelihood: Likelihood,
) -> list[Trajectory]:
    r"""Return groups whose last members have given way to answers that the policy finds easiest to follow.

    .. math:: r = \min(1, \exp(\operatorname{mean}_t \log \pi(y_t)))

    AMPO, arXiv:2510.02227: the k answers with the largest r, of equal ones the shortest.

    Args:
        groups: members of each group.
        offered: answers that may take places in it.
        members: k.
        likelihood: returns the means; it is asked once for all answers.
    """
    everyone = [t for answers in offered for t in answers]
    known = dict(zip(map(id, everyone), likelihood(everyone), strict=True)) if everyone else {}
    batch: list[Trajectory] = []
    for group, answers in zip(groups, offered, strict=True):
        chosen = sorted(answers, key=lambda t: (-min(known[id(t)], 0.0), len(t)))[:members]
        batch += [*group[: len(group) - len(chosen)], *chosen]
    return batch


def _prompt(t: Trajectory) -> bytes:
    return t.token_ids[: t.prompt_tokens].astype("<i4").tobytes()


def taught_answers(
    config: LearnerConfig, read: Callable[[], Sequence[Conversation]]
) -> TaughtAnswers | TaughtMembers | None:
    """Return what puts teachers' answers into the groups of a run; None if it has none.

    Args:
        read: reads those of ``config.taught``.
    """
    if isinstance(config.family, TaughtFamily):
        return TaughtMembers(config.family.members)
    return None if config.taught is None else TaughtAnswers(config.taught, read())
