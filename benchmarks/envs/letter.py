"""A dense toy task: fill the response with one letter. The reward is the share of it, in [0, 1]."""

from typing import Any

from envs.base import ChatMessage, Split, StepResult

LETTERS = "abcdefgh"
TARGET = "e"


class LetterSuite:
    """Prompts differ by a word, the target letter is always the same.

    Args:
        length: characters of a response; what ends early lacks the rest.
        prompts: how many different ones there are.
    """

    def __init__(self, length: int = 32, prompts: int = 4) -> None:
        self.length, self.prompts = length, prompts

    def episode(self) -> "LetterEpisode":
        return LetterEpisode(self)

    def question(self, index: int) -> ChatMessage:
        letter = LETTERS[index % self.prompts]
        return {"role": "user", "content": letter}

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """A response of the right length with all letters: the warm start, if any, teaches no letter more."""
        text = "".join(LETTERS[(index + i * (1 + index % 5)) % len(LETTERS)] for i in range(self.length))
        return [self.question(index), {"role": "assistant", "content": text}]

    async def close(self) -> None:
        pass


class LetterEpisode:
    """One response."""

    def __init__(self, suite: LetterSuite) -> None:
        self._suite = suite

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        return [self._suite.question(int(data["index"]))]

    async def step(self, action: str) -> StepResult:
        share = min(1.0, action.count(TARGET) / self._suite.length)
        return StepResult(rewards={"share": share}, done=True, correct=share == 1.0)

    async def close(self) -> None:
        pass
