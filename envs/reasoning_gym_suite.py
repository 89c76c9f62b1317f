"""Suite of single questions from the reasoning_gym library: one user message, one answer, one score."""

import re
from typing import Any

from envs.base import ChatMessage, Env, Split, StepResult, SuiteFacts
from envs.errors import EnvError
from envs.scoring.questions import Family
from envs.scoring.scorer import Question, Scorer
from envs.scoring.worker_process import Sandbox

SEARCHED_CHARS = 16_384
"""Characters at the end of an answer in which `extract` is looked for."""


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
        prompt: text of the user message, with ``{question}`` and the fields of the question's metadata in braces,
            such as ``{expression}``. If it is empty, the message is the question.
        extract: regular expression that finds the answer in the action, see `found_by`. If it is empty, the whole
            action is the answer.
        hints: give the library's solution as the hint of a task, for methods that give hints.

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
        prompt: str = "",
        extract: str = "",
        hints: bool = False,
    ) -> None:
        if not 0.0 <= exact_bonus <= 1.0:
            raise EnvError(f"exact_bonus = {exact_bonus} is not in [0, 1]")
        try:
            self._extract = re.compile(extract, re.DOTALL) if extract else None
        except re.error as error:
            raise EnvError(f"extract = {extract!r} is not a regular expression: {error}") from None
        self.scorer = Scorer(Family(family, config or {}, seed, heldout_share), sandbox)
        self._exact_bonus, self._hints = exact_bonus, hints
        self._instruction, self._prompt = instruction, prompt
        if prompt:
            try:
                self.opening(self.scorer.entry_now(0, "train"))
            except EnvError:
                self.scorer.close_now()
                raise

    def opening(self, entry: Question) -> list[ChatMessage]:
        """Return the first messages of an episode.

        Raises:
            EnvError: the question has no field that the prompt names.
        """
        return opening(filled(self._prompt, entry) if self._prompt else entry.question, self._instruction)

    def episode(self) -> Env:
        return _QuestionEpisode(self)

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a question and its solution.

        Raises:
            LookupError: the library gives no solution for this family.
        """
        entry = self.scorer.entry_now(index, split)
        if entry.answer is None:
            raise LookupError(f"task {index} of {split}: the library gives no solution for this family")
        return [*self.opening(entry), {"role": "assistant", "content": entry.answer}]

    def answer_in(self, action: str) -> str:
        """Return the part of an action that is scored."""
        return action if self._extract is None else found_by(self._extract, action)

    def hints(self, entry: Question) -> tuple[str, ...]:
        """Return the library's solution of a question, if there is one and it is to be given."""
        return (entry.answer,) if self._hints and entry.answer else ()

    def reward(self, score: float) -> float:
        """Return the reward of a score."""
        return blend(score, self._exact_bonus)

    def facts(self) -> SuiteFacts:
        """Return the name of the reward, and whether there are hints; an episode of one turn has no marks."""
        hints = self._hints and self.scorer.entry_now(0, "train").answer is not None
        return SuiteFacts(reward_names=("score",), mark_names=(), hints=hints)

    def gauges(self) -> dict[str, float]:
        """Return the scorer's counters, for the actor's heartbeat."""
        return self.scorer.gauges()

    async def close(self) -> None:
        await self.scorer.close()


class _QuestionEpisode:
    def __init__(self, suite: ReasoningGymSuite) -> None:
        self._suite = suite
        self._entry: Question | None = None

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        self._entry = await self._suite.scorer.entry(*task_of(data))
        return self._suite.opening(self._entry)

    async def step(self, action: str) -> StepResult:
        assert self._entry is not None, "step before reset"
        answer = self._suite.answer_in(action).strip()
        score = await self._suite.scorer.score(self._entry.position, answer)
        rewards = {"score": self._suite.reward(score)}
        return StepResult(
            rewards=rewards,
            done=True,
            correct=score == 1.0,
            info={"score": score},
            hints=self._suite.hints(self._entry),
            answer=answer,
            target=self._entry.answer,
        )

    async def close(self) -> None:
        return None


def filled(prompt: str, entry: Question) -> str:
    """Return a prompt with the fields of a question in the places of their names in braces.

    Raises:
        EnvError: the question has no such field.

    Example:
        >>> filled("What is {expression}?", Question("Calculate 1+2.", "3", 0, {"expression": "1+2"}))
        'What is 1+2?'
    """
    fields = {"question": entry.question, **entry.fields}
    try:
        return prompt.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise EnvError(
            f"prompt = {prompt!r}: {error}; the fields of this family are {', '.join(fields)}"
        ) from None


def found_by(pattern: re.Pattern[str], action: str) -> str:
    """Return the last match of a pattern, or its first group if it has one; the whole action without a match.

    It is looked for in the last `SEARCHED_CHARS` characters: a pattern may take the square of what it searches, such as
    one of a mark that is opened again and again.

    Example:
        >>> found_by(re.compile(r"-?[0-9]+"), "The sum of 2 and 3 is 5."), found_by(re.compile("[0-9]+"), "five")
        ('5', 'five')
        >>> found_by(re.compile("[0-9]*"), "5 apples")
        '5'
        >>> found_by(re.compile("<answer>(.*?)</answer>"), "I think <answer>5</answer> it is")
        '5'
    """
    found = [match for match in pattern.finditer(action, max(0, len(action) - SEARCHED_CHARS)) if match[0]]
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
