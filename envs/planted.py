"""Suite of words to spell backward with the working shown, and of workings with a planted mistake to be found.

An answer to the word ``sun`` is ``nus=nus``: the working, then the result. A result may be right by luck, behind a
working that is wrong. A share of the tasks shows such an answer and asks for the number of the first wrong letter of
its working, 0 for none. So one policy learns to answer and to judge (FAPO, arXiv:2510.22543).
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.base import ChatMessage, Env, Split, StepResult, SuiteFacts
from envs.calculator import falls_due
from envs.errors import EnvError
from envs.reasoning_gym_suite import task_of
from envs.scoring.questions import Family
from envs.scoring.scorer import Question, Scorer
from envs.scoring.worker_process import Sandbox

SHORTEST = 3
"""Letters of the shortest words."""
ATTEMPT = "{attempt}"
NOTE = "Mistake?\n{attempt}"
"""Words around an answer that is judged, which stands where `{attempt}` is. It is the default of a family of kind
"verdict", so that the policy is asked alike about planted mistakes and about its own."""
REWARDS = ("right", "working", "verdict")
UNREAD = -1.0
"""Reward of a judgement that cannot be read: that of a wrong one."""
_ANSWER = re.compile(r"\s*(?P<working>[A-Za-z]+)=(?P<result>[A-Za-z]+)\s*")
_STEP = re.compile(r"\s*(\d{1,3})\s*")


def verdict_reward(named: int, truth: int, steps: int) -> float:
    r"""Return the reward of a judgement that names the first mistake, -1 to 1.

    .. math::
        R = \pm 1 - \mathbb{1}[\hat t > 0 \wedge t > 0] \, \frac{|\hat t - t|}{n}

    FAPO, arXiv:2510.22543, and its program: the first term is +1 if the judgement is right that there is a mistake, or
    that there is none. A mistake that was found at the wrong place costs its distance, as a share of all steps. A step
    that the answer does not have is a judgement that cannot be read, which is worth -1, too.

    Args:
        named: number of the step that the judgement names, from 1; 0: it finds no mistake.
        truth: number of the first wrong step; 0: there is none.
        steps: steps of the answer, at least 1.

    Example:
        >>> [verdict_reward(named, 3, 4) for named in (3, 2, 1, 0, 5)], verdict_reward(0, 0, 4), verdict_reward(2, 0, 4)
        ([1.0, 0.75, 0.5, -1.0, -1.0], 1.0, -1.0)
    """
    if (named > 0) != (truth > 0) or named > steps:
        return UNREAD
    return 1.0 - abs(named - truth) / steps


def first_mistake(working: str, answer: str) -> int:
    """Return the number of the first letter of a working that is wrong or lacking, from 1; 0 if all are right.

    Example:
        >>> [first_mistake(working, "nus") for working in ("nus", "nxs", "nu", "nusx")]
        [0, 2, 3, 4]
    """
    if working == answer:
        return 0
    same = [a == b for a, b in zip(working, answer, strict=False)]
    return same.index(False) + 1 if False in same else len(same) + 1


def with_mistake(text: str, place: int, rng: np.random.Generator) -> str:
    """Return a text with another letter at a place, from 0.

    Example:
        >>> with_mistake("nus", 1, np.random.default_rng(0)) != "nus"
        True
    """
    others = [letter for letter in "abcdefghijklmnopqrstuvwxyz" if letter != text[place]]
    return text[:place] + others[int(rng.integers(len(others)))] + text[place + 1 :]


@dataclass(frozen=True)
class Planted:
    """An answer with a mistake in it, or without one."""

    attempt: str
    truth: int
    """Number of the first wrong step of its working; 0: there is none."""


class PlantedSuite:
    """Suite of words with a working, and of planted mistakes.

    Args:
        longest: letters of the longest word. The shortest have 3.
        planted: share of the tasks that show an answer and ask for its first mistake, spread evenly over their
            numbers. 0: all tasks are words; 1: all are judgements.
        known: probability that the result of a demonstration is right.
        lucky: probability that its working has a mistake, whatever its result is.
        note: words around an answer that is judged. A family of kind "verdict" needs the same ones.
        seed, heldout_share, sandbox: see `envs.reasoning_gym_suite.ReasoningGymSuite`.

    Raises:
        EnvError: a share is not in [0, 1], there are no such words, or the note has no place for the answer.
    """

    def __init__(
        self,
        longest: int = 4,
        planted: float = 0.5,
        known: float = 0.5,
        lucky: float = 0.5,
        note: str = NOTE,
        seed: int = 0,
        heldout_share: float = 0.125,
        sandbox: Sandbox = "auto",
    ) -> None:
        for name, share in (("planted", planted), ("known", known), ("lucky", lucky)):
            if not 0.0 <= share <= 1.0:
                raise EnvError(f"{name} = {share:g}: a share is from 0 to 1")
        if longest < SHORTEST:
            raise EnvError(f"longest = {longest}: words have at least {SHORTEST} letters")
        if note.count(ATTEMPT) != 1:
            raise EnvError(f"note = {note!r}: write {ATTEMPT} once, where the answer is to stand")
        words = {"min_word_len": SHORTEST, "max_word_len": longest}
        self.scorer = Scorer(Family("spell_backward", words, seed, heldout_share), sandbox)
        self._planted, self._known, self._lucky = planted, known, lucky
        self._note, self._seed = note, seed

    def episode(self) -> Env:
        return _PlantedEpisode(self)

    def facts(self) -> SuiteFacts:
        """Return the names of the rewards."""
        return SuiteFacts(reward_names=REWARDS, mark_names=(), hints=False)

    def planted_in(self, entry: Question, index: int) -> Planted | None:
        """Return the answer that a task shows; None if the task is a word to spell.

        Half of the shown workings have a mistake, at a random place. The result is right in half of the answers,
        whatever the working is, so that it says nothing about it.
        """
        if not falls_due(index, self._planted):
            return None
        rng, answer = np.random.default_rng([self._seed, index, 3]), entry.answer or ""
        truth = int(rng.integers(1, len(answer) + 1)) if rng.random() < 0.5 else 0
        working = with_mistake(answer, truth - 1, rng) if truth else answer
        result = answer if rng.random() < 0.5 else with_mistake(answer, int(rng.integers(len(answer))), rng)
        return Planted(f"{working}={result}", truth)

    def opening(self, entry: Question, planted: Planted | None) -> list[ChatMessage]:
        """Return the message of the user: the word, and behind it the answer that is to be judged."""
        word = entry.fields["word"]
        return [{"role": "user", "content": word if planted is None else _asked(word, self._note, planted)}]

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return an answer whose result and whose working are right by chance, or a right judgement. Blocks."""
        entry = self.scorer.entry_now(index, split)
        planted = self.planted_in(entry, index)
        opening = self.opening(entry, planted)
        if planted is not None:
            return [*opening, {"role": "assistant", "content": str(planted.truth)}]
        rng, answer = np.random.default_rng([self._seed, index, 2]), entry.answer or ""
        result = working = answer
        if rng.random() >= self._known:
            result = with_mistake(answer, int(rng.integers(len(answer))), rng)
        if rng.random() < self._lucky:
            working = with_mistake(answer, int(rng.integers(len(answer))), rng)
        return [*opening, {"role": "assistant", "content": f"{working}={result}"}]

    def gauges(self) -> dict[str, float]:
        """Return the scorer's counters, for the actor's heartbeat."""
        return self.scorer.gauges()

    async def close(self) -> None:
        await self.scorer.close()


def score_answer(action: str, answer: str) -> dict[str, float]:
    """Return the rewards of a spelled word: of its result, which is what counts, and of its working.

    Example:
        >>> score_answer("nus=nus", "nus"), score_answer("nxs=nus", "nus")
        ({'right': 1.0, 'working': 1.0}, {'right': 1.0, 'working': 0.0})
    """
    found = _ANSWER.fullmatch(action)
    if found is None:
        return {"right": 0.0, "working": 0.0}
    return {"right": float(found["result"] == answer), "working": float(found["working"] == answer)}


def score_judgement(action: str, planted: Planted) -> float:
    """Return the reward of a judgement; see `verdict_reward`.

    Example:
        >>> score_judgement("2", Planted("nxs=nus", 2)), score_judgement("nus", Planted("nxs=nus", 2))
        (1.0, -1.0)
    """
    named = _STEP.fullmatch(action)
    if named is None:
        return UNREAD
    return verdict_reward(int(named[1]), planted.truth, len(planted.attempt.partition("=")[0]))


def _asked(word: str, note: str, planted: Planted) -> str:
    # As an actor puts the note of a family behind the last message.
    return f"{word}\n\n{note.replace(ATTEMPT, planted.attempt)}"


class _PlantedEpisode:
    """One answer or one judgement."""

    def __init__(self, suite: PlantedSuite) -> None:
        self._suite = suite
        self._answer = ""
        self._planted: Planted | None = None

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        index, split = task_of(data)
        entry = await self._suite.scorer.entry(index, split)
        self._answer, self._planted = entry.answer or "", self._suite.planted_in(entry, index)
        return self._suite.opening(entry, self._planted)

    async def step(self, action: str) -> StepResult:
        if self._planted is None:
            rewards = score_answer(action, self._answer)
            correct, target = rewards["right"] > 0, self._answer
        else:
            rewards = {"verdict": score_judgement(action, self._planted)}
            correct, target = rewards["verdict"] == 1.0, str(self._planted.truth)
        return StepResult(rewards=rewards, done=True, correct=correct, answer=action.strip(), target=target)

    async def close(self) -> None:
        return None
