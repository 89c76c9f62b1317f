"""An episode of the suite `rows`: one prompt, and one answer that is scored."""

from collections.abc import Awaitable, Callable
from typing import Any

from envs.base import ChatMessage, Split, StepResult
from envs.reasoning_gym_suite import task_of
from envs.rows.prompts import RawPrompt
from envs.rows.reading import DataRow


class RowEpisode:
    """One row and the answer to its prompt.

    Args:
        begin: returns the row of a task, its prompt, and the first messages.
        score: returns the result of an answer.
    """

    def __init__(
        self,
        begin: Callable[[int, Split], tuple[DataRow, RawPrompt, list[ChatMessage]]],
        score: Callable[[str, DataRow, RawPrompt], StepResult | Awaitable[StepResult]],
    ) -> None:
        self._begin, self._score = begin, score
        self._begun: tuple[DataRow, RawPrompt] | None = None

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        row, prompt, messages = self._begin(*task_of(data))
        self._begun = row, prompt
        return messages

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Score an answer. A plain function, so that the actor runs it in a thread, and functions may block."""
        assert self._begun is not None, "step before reset"
        return self._score(action, *self._begun)

    async def close(self) -> None:
        return None
