"""A toy task with a dense reward: fill the response with one letter. The reward is its share, in [0, 1]."""

from typing import Any

from envs.base import ChatMessage, Split, StepResult

LETTERS = "abcdefgh"
TARGET = "e"


class LetterSuite:
    """Tasks whose prompt is one of a few letters. The target letter is always `TARGET`, whatever the prompt.

    Args:
        length: characters of a full response. A response that ends early earns nothing for the missing
            characters.
        prompts: number of different prompts.
    """

    def __init__(self, length: int = 32, prompts: int = 4) -> None:
        self.length, self.prompts = length, prompts

    def episode(self) -> "LetterEpisode":
        return LetterEpisode(self)

    def question(self, index: int) -> ChatMessage:
        letter = LETTERS[index % self.prompts]
        return {"role": "user", "content": letter}

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a response of the right length that cycles through letters, so a warm start favours none."""
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
