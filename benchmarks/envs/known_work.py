"""Tasks whose work is known in advance: length of responses, number of turns, latency of the tool.

A prompt names a length and a letter. The right response repeats the letter for that length, and the reward is
dense. In a task with several turns, a tool answers each response after a latency and names the next letter.
The task fixes lengths and turns, so the work stays the same however well the policy has learned. Benchmarks
of speed need that.
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
"""Letters without a meaning. They make prompts differ, so that the warm start cannot memorise a prompt."""
NOISE_LETTERS = 4
LENGTHS = (8, 12, 16, 32, 64, 128, 256)
"""Possible lengths of a response. A prompt names a length by its index in this tuple."""


@dataclass(frozen=True)
class Work:
    """One task."""

    length: int
    """Characters of each response."""
    letters: str
    """The right letter of each turn."""
    noise: str

    def question(self, turn: int) -> str:
        """Return the message of the user, or of the tool, before this turn."""
        return f"{LENGTHS.index(self.length)}{self.letters[turn]}{self.noise}"


class WorkSuite:
    """Tasks with given lengths and turns.

    Args:
        kinds: rows of (characters per response, turns, share of the tasks). The shares sum to 1.
        latency_s: minimum and maximum seconds of a tool call; latencies are log-uniform between them. Empty:
            the tool answers at once. Held-out tasks have no latency, because the benchmarks time training
            only.
        budgeted: limit each response to the tokens that its task asks for, plus the one that ends the
            response. Further tokens earn nothing, and they would be work that one mode does and the other
            does not.
        known: share of characters that demonstrations have right beyond chance, 0 to 1.
        seed: seed of tasks, demonstrations and latencies.

    Raises:
        EnvError: a setting is invalid.
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
        """Return the task of an index. It is the same in every call."""
        rng = self._rng(index, split)
        length, turns, _ = self._kinds[rng.choice(len(self._kinds), p=[kind[2] for kind in self._kinds])]
        letters = "".join(rng.choice(list(LETTERS), size=int(turns)))
        return Work(int(length), letters, "".join(rng.choice(list(NOISE), size=NOISE_LETTERS)))

    def budget(self, index: int, split: Split) -> int:
        """Return the token limit of each response of a task. It applies only if ``budgeted`` is set."""
        return self.task(index, split).length + 1

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a conversation with responses of the right length and mostly random characters."""
        task, rng = self.task(index, split), self._rng(index, split, 1)
        talk: list[ChatMessage] = []
        for turn, letter in enumerate(task.letters):
            text = rng.choice(list(LETTERS), size=task.length)
            text[rng.random(task.length) < self._known] = letter
            talk.append({"role": "tool" if turn else "user", "content": task.question(turn)})
            talk.append({"role": "assistant", "content": "".join(text)})
        return talk

    def latency(self) -> float:
        """Return the seconds that the next tool call takes. Latencies are drawn in the order of calls."""
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
