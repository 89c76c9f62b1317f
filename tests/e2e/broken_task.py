"""A task that is broken on purpose, named by tests of `offbeat train` as a user names an own file.

The environment variable `FAULT` says what is wrong with it, so that all faults share one tiny model.
"""

import os
import sys
from typing import Any

from envs.base import ChatMessage, Split, StepResult

LETTERS = "abcdefgh"
FAULT = "OFFBEAT_TEST_FAULT"
UNUSABLE = ("good", None, float("nan"), [])


class Suite:
    """Repeat a letter. A reward is the share of the letter in the answer."""

    def episode(self) -> "Episode":
        return Episode()

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        letter = LETTERS[index % len(LETTERS)]
        question: ChatMessage = {"role": "user", "content": letter}
        return [question, {"role": "assistant", "content": letter * (1 + index % 8)}]

    async def close(self) -> None:
        pass


class Episode:
    """One answer."""

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        self.index = int(data["index"])
        return [{"role": "user", "content": LETTERS[self.index % len(LETTERS)]}]

    async def step(self, action: str) -> StepResult:
        # The check of a run and the maker of its model try the task, and refuse one that raises at once.
        tried = sys.argv[1:2] != ["actor"]
        fault = "" if tried else os.environ.get(FAULT, "")
        # The builtin hash of the answer would differ between processes.
        odd = len(action) % 2 == 1
        if fault == "raises" or (fault == "half raises" and odd):
            return StepResult(rewards={"r": answer_of({"question": action})}, done=True)
        reward: Any = action.count("a") / 8 + len(action) / 16
        if fault == "constant":
            reward = 0.0
        if fault == "unusable rewards" and odd:
            reward = UNUSABLE[len(action) // 2 % len(UNUSABLE)]
        return StepResult(rewards={"r": reward}, done=True)

    async def close(self) -> None:
        pass


def answer_of(task: dict[str, str]) -> float:
    return float(task["answer"])
