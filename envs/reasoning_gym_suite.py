"""Suite of single questions from the reasoning_gym library: one user message, one answer, one score."""

import re
from typing import Any

from envs.base import ChatMessage, Env, Split, StepResult
from envs.errors import EnvError
from envs.family import Family
from envs.sandbox import Sandbox
from envs.scorer import Question, Scorer


class ReasoningGymSuite:
    """Suite of one family of reasoning_gym.

    Args:
        family: name of the dataset, e.g. "spell_backward".
        config: settings of the dataset, as for ``reasoning_gym.create_dataset``.
        seed: seed of the generated questions.
        exact_bonus: weight in [0, 1] that only exactly right answers earn, see `blend`. It makes junk
            expensive: some scorers give nearly 1 to a right answer plus junk (spell_backward: 0.9999...).
        heldout_share: share of the questions kept for evaluation, chosen by a hash of the question's text.
        sandbox: "bwrap" (required for families whose scorer runs the answer), "process", or "auto".
        instruction: text of a system message. If it is empty, there is no system message.
        extract: regular expression that finds the answer in the action, see `found_by`. If it is empty, the whole
            action is the answer.

    Raises:
        EnvError: the family is unknown or refused, or a setting is wrong.
    """

    def __init__(
        self,
        family: str,
        config: dict[str, Any] | None = None,
        seed: int = 0,
        exact_bonus: float = 0.0,
        heldout_share: float = 0.125,
        sandbox: Sandbox = "auto",
        instruction: str = "",
        extract: str = "",
    ) -> None:
        if not 0.0 <= exact_bonus <= 1.0:
            raise EnvError(f"exact_bonus = {exact_bonus} is not in [0, 1]")
        try:
            self._extract = re.compile(extract, re.DOTALL) if extract else None
        except re.error as error:
            raise EnvError(f"extract = {extract!r} is not a regular expression: {error}") from None
        self.scorer = Scorer(Family(family, config or {}, seed, heldout_share), sandbox)
        self._exact_bonus = exact_bonus
        self._instruction = instruction

    def episode(self) -> Env:
        return _QuestionEpisode(self.scorer, self._exact_bonus, self._instruction, self._extract)

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a question and its solution.

        Raises:
            LookupError: the library gives no solution for this family.
        """
        entry = self.scorer.entry_now(index, split)
        if entry.answer is None:
            raise LookupError(f"task {index} of {split}: the library gives no solution for this family")
        return [*opening(entry.question, self._instruction), {"role": "assistant", "content": entry.answer}]

    def gauges(self) -> dict[str, float]:
        """Return the scorer's counters, for the actor's heartbeat."""
        return self.scorer.gauges()

    async def close(self) -> None:
        await self.scorer.close()


class _QuestionEpisode:
    def __init__(
        self, scorer: Scorer, exact_bonus: float, instruction: str, extract: re.Pattern[str] | None
    ) -> None:
        self._scorer, self._exact_bonus, self._instruction = scorer, exact_bonus, instruction
        self._extract = extract
        self._entry: Question | None = None

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        self._entry = await self._scorer.entry(*task_of(data))
        return opening(self._entry.question, self._instruction)

    async def step(self, action: str) -> StepResult:
        assert self._entry is not None, "step before reset"
        answer = action if self._extract is None else found_by(self._extract, action)
        score = await self._scorer.score(self._entry.position, answer.strip())
        rewards = {"score": blend(score, self._exact_bonus)}
        return StepResult(rewards=rewards, done=True, correct=score == 1.0, info={"score": score})

    async def close(self) -> None:
        return None


def found_by(pattern: re.Pattern[str], action: str) -> str:
    """Return the last match of a pattern, or its first group if it has one; the whole action without a match.

    Example:
        >>> found_by(re.compile(r"-?[0-9]+"), "The sum of 2 and 3 is 5."), found_by(re.compile("[0-9]+"), "five")
        ('5', 'five')
        >>> found_by(re.compile("<answer>(.*?)</answer>"), "I think <answer>5</answer> it is")
        '5'
    """
    found = list(pattern.finditer(action))
    if not found:
        return action
    return (found[-1][1] or "") if pattern.groups else found[-1][0]


def blend(score: float, exact_bonus: float) -> float:
    """Return the reward ``(1 - w) * score + w * [score = 1]``, with w = ``exact_bonus``.

    A larger w moves weight from nearly right answers to exactly right ones.

    Example:
        >>> blend(0.5, 0.5), blend(1.0, 0.5), blend(0.5, 0.0)
        (0.25, 1.0, 0.5)
    """
    return (1.0 - exact_bonus) * score + exact_bonus * float(score == 1.0)


def task_of(data: dict[str, Any]) -> tuple[int, Split]:
    """Return the index and split of a task.

    Raises:
        EnvError: ``data`` holds no valid index or split.
    """
    index, split = data.get("index"), data.get("split", "train")
    if type(index) is not int or index < 0 or split not in ("train", "heldout"):
        raise EnvError(f'task data {data!r}: expected {{"index": int >= 0, "split": "train" | "heldout"}}')
    return index, split


def opening(question: str, instruction: str) -> list[ChatMessage]:
    """Return the first messages of an episode."""
    user: ChatMessage = {"role": "user", "content": question}
    return [{"role": "system", "content": instruction}, user] if instruction else [user]
