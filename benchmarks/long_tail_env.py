"""A toy task whose responses are long-tailed: most end after a few characters, a few go on for hundreds.

The prompt names a length and a letter; the right response is that letter so many times. The reward comes when the
response ends, and is dense: the right characters among the first n, over n or the length of the response, whichever
is more. So it pays neither to stop early nor to go on, and responses keep roughly the lengths that the warm start
taught: what is left to learn are the letters, and to end on the spot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.base import ChatMessage, Split, StepResult
from envs.errors import EnvError

LETTERS = "abcdefgh"
NAMES = "0123456789"
"""Of the lengths, in the prompt."""


@dataclass(frozen=True)
class LongTailTask:
    """What is asked for."""

    question: str
    """The prompt's text."""
    letter: str
    length: int
    long: bool
    """Whether it belongs to the tail."""


class LongTailSuite:
    """Responses of a few short and a few long lengths.

    Args:
        short, long: lengths in characters, equally likely among themselves.
        long_share: of the tasks, 0 to 1.
        known: share of characters that demonstrations have right beyond chance, 0 to 1: how much the warm
            start gives away.
        seed: of tasks and demonstrations.

    Raises:
        EnvError: settings that cannot be.
    """

    def __init__(
        self,
        short: Sequence[int] = (4, 8, 12),
        long: Sequence[int] = (96, 128, 160),
        long_share: float = 0.1,
        known: float = 0.25,
        seed: int = 0,
    ) -> None:
        lengths = [*short, *long]
        if not short or not long or min(lengths) < 1 or len(lengths) > len(NAMES):
            raise EnvError(
                f"short = {short}, long = {long}: give some of each, at least 1, at most {len(NAMES)} in all"
            )
        if not (0 <= long_share <= 1 and 0 <= known <= 1):
            raise EnvError(f"long_share = {long_share}, known = {known}: each is a share, 0 to 1")
        self._short, self._long = list(short), list(long)
        self._long_share, self._known, self._seed = long_share, known, seed

    def episode(self) -> "LongTailEpisode":
        return LongTailEpisode(self)

    def task(self, index: int, split: Split) -> LongTailTask:
        """The task of an index, the same every time."""
        rng = self._rng(index, split)
        long = bool(rng.random() < self._long_share)
        length = int(rng.choice(self._long if long else self._short))
        letter = str(rng.choice(list(LETTERS)))
        name = NAMES[[*self._short, *self._long].index(length)]
        return LongTailTask(name + letter, letter, length, long)

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """A response of the right length whose characters are mostly left to chance."""
        task, rng = self.task(index, split), self._rng(index, split, 1)
        text = rng.choice(list(LETTERS), size=task.length)
        text[rng.random(task.length) < self._known] = task.letter
        return [{"role": "user", "content": task.question}, {"role": "assistant", "content": "".join(text)}]

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
        share = share_right(action, self._task.letter, self._task.length)
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
