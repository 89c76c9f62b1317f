"""Single-turn episodes with almost no cost of their own: a random prompt, one answer, a reward of 0 or of chance."""

import random
from typing import Any

from envs.base import ChatMessage, StepResult

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-*/=()., "


class PromptSuite:
    """Tasks with one random prompt per index.

    Args:
        length: characters of a prompt, each of them one token.
        chance: give each episode a random reward in [0, 1), so that a learner trains on every group.
    """

    def __init__(self, length: int = 30, *, chance: bool = False) -> None:
        self.length, self.chance = length, chance

    def question(self, index: int) -> ChatMessage:
        text = "".join(random.Random(index).choices(LETTERS, k=self.length))
        return {"role": "user", "content": text}

    def episode(self) -> "PromptEpisode":
        return PromptEpisode(self)

    async def close(self) -> None:
        pass


class PromptEpisode:
    """An episode that asks once and then ends."""

    def __init__(self, suite: PromptSuite) -> None:
        self._suite = suite

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        return [self._suite.question(int(data["index"]))]

    async def step(self, action: str) -> StepResult:
        return StepResult(rewards={"chance": random.random() if self._suite.chance else 0.0}, done=True)

    async def close(self) -> None:
        pass
