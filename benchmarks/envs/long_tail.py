"""A toy task whose responses are long-tailed: most have a few characters, a few have hundreds.

The prompt says whether a short or a long response is asked for; the right one is one letter so many times, and that is
also how many tokens the response is given. So lengths are the task's: no method looks fast by shortening its answers,
and none can lose itself in long ones. What is to be learned is the letter. The reward comes when the response ends,
and is dense: the right letters over the length asked for.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.envs.letter import LETTERS, TARGET
from envs.base import ChatMessage, Split, StepResult
from envs.errors import EnvError

KINDS = "01"
"""How the prompt of a short and of a long task begins."""
NOISE = 6
"""Letters of the prompt that say nothing, so that demonstrations differ."""


@dataclass(frozen=True)
class LongTailTask:
    """What is asked for."""

    question: str
    """The prompt's text."""
    length: int
    """Characters, and the tokens it is given."""
    long: bool
    """Whether it belongs to the tail."""


class LongTailSuite:
    """Many short responses and a few long ones.

    Args:
        short, long: lengths in characters.
        long_share: of the tasks, 0 to 1.
        seed: of tasks and demonstrations.

    Raises:
        EnvError: settings that cannot be.
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
        """The task of an index, the same every time."""
        rng = self._rng(index, split)
        long = bool(rng.random() < self._long_share)
        return LongTailTask(KINDS[long] + _letters(rng, NOISE), self._long if long else self._short, long)

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Letters left to chance, as many as for a long one, whatever was asked for: nothing ends by itself."""
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
    """Right characters among the first ``length``, over that or the text's length, whichever is more.

    Example:
        >>> [share_right(text, "a", 4) for text in ("aaba", "aa", "aaaaa", "")]
        [0.75, 0.5, 0.8, 0.0]
    """
    return text[:length].count(letter) / max(length, len(text))


def _letters(rng: np.random.Generator, count: int) -> str:
    return "".join(rng.choice(list(LETTERS), size=count))
