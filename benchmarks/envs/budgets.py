"""A toy task with a limit: more is better up to it, and everything is lost beyond it."""

from typing import Any

from benchmarks.envs.letters import LETTERS, TARGET
from envs.base import ChatMessage, Split, StepResult


class BudgetSuite:
    """Tasks whose prompt is one of a few letters, without a meaning. Each `TARGET` in a response pays, up to a limit.

    A response with more of them pays nothing, as an answer that grows beyond its limit of tokens is cut off and fails.
    So a step that was right under an old policy may be wrong under the present one.

    Args:
        length: characters of a full response.
        limit: most characters that may be `TARGET`.
        prompts: number of different prompts.
    """

    def __init__(self, length: int = 8, limit: int = 6, prompts: int = 4) -> None:
        self.length, self.limit, self.prompts = length, limit, prompts

    def episode(self) -> "BudgetEpisode":
        return BudgetEpisode(self)

    def question(self, index: int) -> ChatMessage:
        return {"role": "user", "content": LETTERS[index % self.prompts]}

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a response of the right length that cycles through letters, so a warm start favours none."""
        text = "".join(LETTERS[(index + i * (1 + index % 5)) % len(LETTERS)] for i in range(self.length))
        return [self.question(index), {"role": "assistant", "content": text}]

    async def close(self) -> None:
        pass


class BudgetEpisode:
    """One response."""

    def __init__(self, suite: BudgetSuite) -> None:
        self._suite = suite

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        return [self._suite.question(int(data["index"]))]

    async def step(self, action: str) -> StepResult:
        value = within(action[: self._suite.length], self._suite.limit)
        return StepResult(rewards={"share": value}, done=True, correct=value == 1.0)

    async def close(self) -> None:
        pass


def within(text: str, limit: int) -> float:
    """Return how many characters are `TARGET`, over the limit; 0 if they are more.

    Example:
        >>> [within(text, 2) for text in ("xxxx", "exxx", "eexx", "eeex")]
        [0.0, 0.5, 1.0, 0.0]
    """
    found = text.count(TARGET)
    return found / limit if found <= limit else 0.0
