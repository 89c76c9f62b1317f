"""A toy task whose goal moves with the policy: neighbouring letters of an answer have to agree."""

from itertools import pairwise
from typing import Any

from benchmarks.envs.letters import LETTERS
from envs.base import ChatMessage, Split, StepResult


class NeighbourSuite:
    """Tasks whose prompt is one of a few letters, without a meaning. Any letter will do, if it is repeated.

    Args:
        length: characters of a full response.
        prompts: number of different prompts.
    """

    def __init__(self, length: int = 8, prompts: int = 4) -> None:
        self.length, self.prompts = length, prompts

    def episode(self) -> "NeighbourEpisode":
        return NeighbourEpisode(self)

    def question(self, index: int) -> ChatMessage:
        return {"role": "user", "content": LETTERS[index % self.prompts]}

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a response of the right length that cycles through letters, so a warm start favours none."""
        text = "".join(LETTERS[(index + i * (1 + index % 5)) % len(LETTERS)] for i in range(self.length))
        return [self.question(index), {"role": "assistant", "content": text}]

    async def close(self) -> None:
        pass


class NeighbourEpisode:
    """One response."""

    def __init__(self, suite: NeighbourSuite) -> None:
        self._suite = suite

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        return [self._suite.question(int(data["index"]))]

    async def step(self, action: str) -> StepResult:
        share = agreeing(action, self._suite.length)
        return StepResult(rewards={"share": share}, done=True, correct=share == 1.0)

    async def close(self) -> None:
        pass


def agreeing(text: str, length: int) -> float:
    """Return the share of the ``length - 1`` pairs of neighbours in a full response that agree.

    Example:
        >>> [round(agreeing(text, 4), 2) for text in ("aaaa", "aabb", "abab", "aa", "")]
        [1.0, 0.67, 0.0, 0.33, 0.0]
    """
    return sum(a == b for a, b in pairwise(text[:length])) / (length - 1)
