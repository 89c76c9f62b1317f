"""Combination locks: all dials must be right at once, so nobody opens one without a hint.

A question is the letter of a lock, for example "B". An answer turns each dial to one of its four symbols, for example
"aeimquy2". Only the whole combination earns something. With eight dials a random answer opens a lock once in 65,536
attempts. The hint of a task is the combination, of which methods give the beginning. Each dial has symbols of its own,
so that a tiny model learns in its warm start to repeat a beginning that stands in the prompt.
"""

import string
from typing import Any

import numpy as np

from envs.base import ChatMessage, Env, Split, StepResult, SuiteFacts
from envs.errors import EnvError

SYMBOLS = string.ascii_lowercase + string.digits
"""Symbols of all dials, four for each."""
CHOICES = 4
"""Symbols of a dial."""
LOCKS = string.ascii_uppercase
"""Letters of the locks."""


def dial(place: int) -> str:
    """Return the symbols of a dial.

    Example:
        >>> dial(0), dial(7)
        ('abcd', '2345')
    """
    return SYMBOLS[CHOICES * place : CHOICES * (place + 1)]


class DialsSuite:
    """Suite of combination locks. The reward is `opened`.

    Args:
        dials: dials of a lock, at most 9.
        locks: number of different locks, at most 26.
        seed: seed of the combinations and of the demonstrations.

    Raises:
        EnvError: a setting is wrong.
    """

    def __init__(self, dials: int = 8, locks: int = 4, seed: int = 0) -> None:
        if not 1 <= dials <= len(SYMBOLS) // CHOICES or not 1 <= locks <= len(LOCKS):
            raise EnvError(
                f"dials = {dials}, locks = {locks}: choose 1 to {len(SYMBOLS) // CHOICES} dials, and 1 to "
                f"{len(LOCKS)} locks"
            )
        self.dials, self.locks, self._seed = dials, locks, seed

    def lock(self, index: int) -> int:
        """Return the lock of a task."""
        return index % self.locks

    def combination(self, lock: int) -> str:
        """Return the combination of a lock.

        Example:
            >>> suite = DialsSuite()
            >>> len({suite.combination(lock) for lock in range(4)}), len(suite.combination(0))
            (4, 8)
        """
        return self._drawn(np.random.default_rng([self._seed, lock]))

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a random answer that begins with the hint in the question. Every eighth question has none.

        No demonstration has anything to do with the combination of its lock.
        """
        rng = np.random.default_rng([self._seed, index, 1])
        answer = self._drawn(rng)
        hint = answer[: int(rng.integers(self.dials))]
        # As the actor puts a note behind a prompt.
        question = "\n\n".join(filter(None, [LOCKS[self.lock(index)], hint]))
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def episode(self) -> Env:
        return DialsEpisode(self)

    def facts(self) -> SuiteFacts:
        """Return the name of the reward, and that every task has a hint; there are no marks."""
        return SuiteFacts(reward_names=("opened",), mark_names=(), hints=True)

    async def close(self) -> None:
        """Do nothing: nothing is open."""

    def _drawn(self, rng: np.random.Generator) -> str:
        return "".join(rng.choice(list(dial(place))) for place in range(self.dials))


class DialsEpisode:
    """One attempt at a lock."""

    def __init__(self, suite: DialsSuite) -> None:
        self._suite = suite
        self._lock = 0

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        """Return the letter of the lock."""
        self._lock = self._suite.lock(int(data["index"]))
        return [{"role": "user", "content": LOCKS[self._lock]}]

    async def step(self, action: str) -> StepResult:
        """Open the lock, or not."""
        combination = self._suite.combination(self._lock)
        opened = action == combination
        return StepResult(rewards={"opened": float(opened)}, done=True, correct=opened, hints=(combination,))

    async def close(self) -> None:
        return None
