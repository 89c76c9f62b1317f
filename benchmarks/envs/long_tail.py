"""A toy task with long-tailed responses: most have a few characters, a few have hundreds.

The prompt asks for a short or a long response. The right response repeats one letter for the requested
length, which is also the response's token limit. The task thus fixes the lengths: no method looks fast
because it shortens its answers, and none loses time on answers that are too long. The policy has to learn the
letter. The reward comes when the response ends, and is dense: the number of right letters over the requested
length.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.envs.letter import LETTERS, TARGET
from envs.base import ChatMessage, Split, StepResult
from envs.errors import EnvError

KINDS = "01"
"""First character of the prompt of a short task, and of a long task."""
NOISE = 6
"""Number of meaningless letters in the prompt, which make demonstrations differ."""


@dataclass(frozen=True)
class LongTailTask:
    """One task."""

    question: str
    """Text of the prompt."""
    length: int
    """Requested characters of the response, and also its token limit."""
    long: bool
    """True for a task of the long tail."""


class LongTailSuite:
    """Tasks with many short responses and a few long ones.

    Args:
        short, long: lengths of the responses in characters.
        long_share: share of the tasks that are long, 0 to 1.
        seed: seed of tasks and demonstrations.

    Raises:
        EnvError: a setting is invalid.
    """

    def __init__(self, short: int = 16, long: int = 448, long_share: float = 0.05, seed: int = 0) -> None:
        if not 1 <= short <= long:
            raise EnvError(f"short = {short}, long = {long}: give 1 <= short <= long")
        if not 0 <= long_share <= 1:
            raise EnvError(f"long_share = {long_share} is not in [0, 1]")
        self._short, self._long, self._long_share, self._seed = short, long, long_share, seed

    def episode(self) -> "LongTailEpisode":
        return LongTailEpisode(self)

    def task(self, index: int, split: Split) -> LongTailTask:
        """Return the task of an index. It is the same in every call."""
        rng = self._rng(index, split)
        long = bool(rng.random() < self._long_share)
        return LongTailTask(KINDS[long] + _letters(rng, NOISE), self._long if long else self._short, long)

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return random letters, always as many as in a long response, so that no early end is learned."""
        text = _letters(self._rng(index, split, 1), self._long)
        question = self.task(index, split).question
        return [{"role": "user", "content": question}, {"role": "assistant", "content": text}]

    async def close(self) -> None:
        pass

    def _rng(self, index: int, split: Split, *more: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, index, int(split == "heldout"), *more])


class LongTailEpisode:
    """One response."""

    def __init__(self, suite: LongTailSuite) -> None:
        self._suite = suite
        self._task: LongTailTask | None = None

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        self._task = self._suite.task(int(data["index"]), data["split"])
        return [{"role": "user", "content": self._task.question}]

    async def step(self, action: str) -> StepResult:
        assert self._task is not None, "step before reset"
        share = share_right(action, TARGET, self._task.length)
        return StepResult(rewards={"share": share}, done=True, correct=share == 1.0)

    async def close(self) -> None:
        pass


def share_right(text: str, letter: str, length: int) -> float:
    """Return the right characters among the first ``length``, over ``length`` or the length of a longer text.

    Example:
        >>> [share_right(text, "a", 4) for text in ("aaba", "aa", "aaaaa", "")]
        [0.75, 0.5, 0.8, 0.0]
    """
    return text[:length].count(letter) / max(length, len(text))


def _letters(rng: np.random.Generator, count: int) -> str:
    return "".join(rng.choice(list(LETTERS), size=count))
