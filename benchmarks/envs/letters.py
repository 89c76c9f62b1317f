"""Toy tasks that ask for letters: one letter with a dense reward, a long tail of lengths, and work known in advance."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.base import ChatMessage, Split, StepResult
from envs.errors import EnvError

LETTERS = "abcdefgh"
TARGET = "e"


class PromptedSuite:
    """Tasks whose prompt is one of a few letters, which means nothing. A function of its text rewards a response.

    Args:
        length: characters of a full response. A response that ends early earns nothing for the missing
            characters.
        prompts: number of different prompts.
        share: reward of a response, in [0, 1].
    """

    def __init__(self, length: int, prompts: int, share: Callable[[str], float]) -> None:
        self.length, self.prompts, self.share = length, prompts, share

    def episode(self) -> "PromptedEpisode":
        return PromptedEpisode(self)

    def question(self, index: int) -> ChatMessage:
        return {"role": "user", "content": LETTERS[index % self.prompts]}

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a response of the right length that cycles through letters, so a warm start favours none."""
        text = "".join(LETTERS[(index + i * (1 + index % 5)) % len(LETTERS)] for i in range(self.length))
        return [self.question(index), {"role": "assistant", "content": text}]

    async def close(self) -> None:
        pass


class PromptedEpisode:
    """One response."""

    def __init__(self, suite: PromptedSuite) -> None:
        self._suite = suite

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        return [self._suite.question(int(data["index"]))]

    async def step(self, action: str) -> StepResult:
        share = self._suite.share(action)
        return StepResult(rewards={"share": share}, done=True, correct=share == 1.0)

    async def close(self) -> None:
        pass


class LetterSuite(PromptedSuite):
    """Each `TARGET` in a response pays, whatever the prompt."""

    def __init__(self, length: int = 32, prompts: int = 4) -> None:
        super().__init__(length, prompts, lambda text: min(1.0, text.count(TARGET) / length))


KINDS = "01"
"""First character of the prompt of a short task, and of a long task."""
LONG_TAIL_NOISE = 6
"""Number of meaningless letters in the prompt, which make demonstrations differ."""


@dataclass(frozen=True)
class LongTailTask:
    """One task."""

    question: str
    """Text of the prompt."""
    length: int
    """Requested characters of the response, and also its token limit."""
    long: bool
    """True for a task of the long tail."""


class LongTailSuite:
    """Tasks with many short responses and a few long ones.

    Args:
        short, long: lengths of the responses in characters.
        long_share: share of the tasks that are long, 0 to 1.
        seed: seed of tasks and demonstrations.

    Raises:
        EnvError: a setting is invalid.
    """

    def __init__(self, short: int = 16, long: int = 448, long_share: float = 0.05, seed: int = 0) -> None:
        if not 1 <= short <= long:
            raise EnvError(f"short = {short}, long = {long}: give 1 <= short <= long")
        if not 0 <= long_share <= 1:
            raise EnvError(f"long_share = {long_share} is not in [0, 1]")
        self._short, self._long, self._long_share, self._seed = short, long, long_share, seed

    def episode(self) -> "LongTailEpisode":
        return LongTailEpisode(self)

    def task(self, index: int, split: Split) -> LongTailTask:
        """Return the task of an index. It is the same in every call."""
        rng = self._rng(index, split)
        long = bool(rng.random() < self._long_share)
        return LongTailTask(
            KINDS[long] + _letters(rng, LONG_TAIL_NOISE), self._long if long else self._short, long
        )

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return random letters, always as many as in a long response, so that no early end is learned."""
        text = _letters(self._rng(index, split, 1), self._long)
        question = self.task(index, split).question
        return [{"role": "user", "content": question}, {"role": "assistant", "content": text}]

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
        share = share_right(action, TARGET, self._task.length)
        return StepResult(rewards={"share": share}, done=True, correct=share == 1.0)

    async def close(self) -> None:
        pass


def share_right(text: str, letter: str, length: int) -> float:
    """Return the right characters among the first ``length``, over ``length`` or the length of a longer text.

    Example:
        >>> [share_right(text, "a", 4) for text in ("aaba", "aa", "aaaaa", "")]
        [0.75, 0.5, 0.8, 0.0]
    """
    return text[:length].count(letter) / max(length, len(text))


def _letters(rng: np.random.Generator, count: int) -> str:
    return "".join(rng.choice(list(LETTERS), size=count))


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
