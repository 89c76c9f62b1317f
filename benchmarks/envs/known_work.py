"""Tasks whose work is known in advance: how long responses are, how many turns, how slow the tool is.

A prompt names a length and a letter; the right response is that letter so many times, and the reward is dense. With
several turns a tool answers each response, after a latency, with the next letter. Lengths and turns are the task's, so
they are the same however well the policy has learned: benchmarks of speed need work that stays what it is.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.envs.long_tail import share_right
from envs.base import ChatMessage, Split, StepResult
from envs.errors import EnvError

LETTERS = "abcdefgh"
NOISE = "stuvwxyz"
"""Letters without a meaning: they make prompts differ, so that a warm start learns none by heart."""
NOISE_LETTERS = 4
LENGTHS = (8, 12, 16, 32, 64, 128, 256)
"""A prompt names a length by its place here."""


@dataclass(frozen=True)
class Work:
    """One task."""

    length: int
    """Characters of each response."""
    letters: str
    """One a turn."""
    noise: str

    def question(self, turn: int) -> str:
        """What the user, or the tool, says before this turn."""
        return f"{LENGTHS.index(self.length)}{self.letters[turn]}{self.noise}"


class WorkSuite:
    """Tasks of stated lengths and turns.

    Args:
        kinds: rows of characters per response, turns, and share of the tasks; the shares sum to 1.
        latency_s: least and most seconds of a tool call; log-uniform between them. Empty: at once. Held-out tasks
            have none: what is measured is training.
        budgeted: a response is given as many tokens as its task asks for, and one that ends it. What goes on beyond
            that is worth nothing here, and would be work that one mode has and the other has not.
        known: share of characters that demonstrations have right beyond chance, 0 to 1.
        seed: of tasks, demonstrations and latencies.

    Raises:
        EnvError: settings that cannot be.
    """

    def __init__(
        self,
        kinds: Sequence[Sequence[float]] = ((32, 1, 1.0),),
        latency_s: Sequence[float] = (),
        budgeted: bool = False,
        known: float = 0.25,
        seed: int = 0,
    ) -> None:
        if wrong := [kind for kind in kinds if len(kind) != 3 or kind[0] not in LENGTHS or kind[1] < 1]:
            raise EnvError(
                f"kinds = {wrong}: each is [length, turns, share], with a length of {list(LENGTHS)}"
            )
        if abs(sum(kind[2] for kind in kinds) - 1) > 1e-6:
            raise EnvError(f"kinds = {kinds}: the shares have to sum to 1")
        if len(latency_s) not in (0, 2) or any(s <= 0 for s in latency_s):
            raise EnvError(f"latency_s = {latency_s}: give the least and the most seconds, both above 0")
        self._kinds, self._latency_s = kinds, tuple(latency_s)
        self.budgeted, self._known, self._seed = budgeted, known, seed
        self._clock = np.random.default_rng([seed, 1])

    def episode(self) -> "WorkEpisode":
        return WorkEpisode(self)

    def task(self, index: int, split: Split) -> Work:
        """The task of an index, the same every time."""
        rng = self._rng(index, split)
        length, turns, _ = self._kinds[rng.choice(len(self._kinds), p=[kind[2] for kind in self._kinds])]
        letters = "".join(rng.choice(list(LETTERS), size=int(turns)))
        return Work(int(length), letters, "".join(rng.choice(list(NOISE), size=NOISE_LETTERS)))

    def budget(self, index: int, split: Split) -> int:
        """Tokens that each response of a task is given, if responses have a budget."""
        return self.task(index, split).length + 1

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Responses of the right length whose characters are mostly left to chance."""
        task, rng = self.task(index, split), self._rng(index, split, 1)
        talk: list[ChatMessage] = []
        for turn, letter in enumerate(task.letters):
            text = rng.choice(list(LETTERS), size=task.length)
            text[rng.random(task.length) < self._known] = letter
            talk.append({"role": "tool" if turn else "user", "content": task.question(turn)})
            talk.append({"role": "assistant", "content": "".join(text)})
        return talk

    def latency(self) -> float:
        """Seconds that the next tool call takes, drawn in the order of calls."""
        if not self._latency_s:
            return 0.0
        low, high = map(math.log, self._latency_s)
        return math.exp(self._clock.uniform(low, high))

    async def close(self) -> None:
        pass

    def _rng(self, index: int, split: Split, *more: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, index, int(split == "heldout"), *more])


class WorkEpisode:
    """One conversation."""

    def __init__(self, suite: WorkSuite) -> None:
        self._suite = suite
        self._task: Work | None = None
        self._turn, self._slow = 0, True

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        self._task = self._suite.task(int(data["index"]), data["split"])
        self._slow = data["split"] == "train"
        return [{"role": "user", "content": self._task.question(0)}]

    async def step(self, action: str) -> StepResult:
        task = self._task
        assert task is not None, "step before reset"
        if self._slow and (seconds := self._suite.latency()):
            await asyncio.sleep(seconds)
        turns = len(task.letters)
        rewards = {"share": share_right(action, task.letters[self._turn], task.length) / turns}
        self._turn += 1
        if self._turn == turns:
            return StepResult(rewards=rewards, done=True)
        return StepResult({"role": "tool", "content": task.question(self._turn)}, rewards)

    async def close(self) -> None:
        pass
