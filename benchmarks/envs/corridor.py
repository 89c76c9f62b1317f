"""A toy task of several turns that pays at its end alone: a door in each room of a corridor, and one right way."""

from typing import Any

import numpy as np

from benchmarks.envs.letters import LETTERS
from envs.base import ChatMessage, Split, StepResult


class CorridorSuite:
    """Rooms one behind the other. An answer is the letter of a door, and no room says whether it was the right one.

    The prompt names the corridor, and each corridor has one way. The reward `through` is 1 if every door was right, so
    a policy that draws at random earns something once in ``doors`` to the power of ``rooms`` episodes.

    Args:
        rooms: turns of an episode.
        doors: doors of a room, at most 8.
        corridors: number of different corridors, at most 8.
        seed: seed of the ways and of the demonstrations.
    """

    def __init__(self, rooms: int = 3, doors: int = 4, corridors: int = 4, seed: int = 0) -> None:
        self.rooms, self._doors, self._corridors, self._seed = rooms, doors, corridors, seed

    def episode(self) -> "CorridorEpisode":
        return CorridorEpisode(self)

    def message(self, index: int, room: int) -> ChatMessage:
        """Return what stands before a turn: the corridor, then the number of the room."""
        if room:
            return {"role": "tool", "content": str(room)}
        return {"role": "user", "content": LETTERS[index % self._corridors].upper()}

    def way(self, index: int) -> str:
        """Return the right doors of a task's corridor.

        Example:
            >>> suite = CorridorSuite(rooms=5)
            >>> len(suite.way(0)), suite.way(1) == suite.way(5)
            (5, True)
        """
        return self._drawn(index % self._corridors)

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return an episode with random doors, so that a warm start favours none."""
        talk: list[ChatMessage] = []
        for room, door in enumerate(self._drawn(index, 1)):
            talk += [self.message(index, room), {"role": "assistant", "content": door}]
        return talk

    async def close(self) -> None:
        pass

    def _drawn(self, *seed: int) -> str:
        rng = np.random.default_rng([self._seed, *seed])
        return "".join(rng.choice(list(LETTERS[: self._doors]), size=self.rooms))


class CorridorEpisode:
    """One way through a corridor."""

    def __init__(self, suite: CorridorSuite) -> None:
        self._suite, self._index = suite, 0
        self._doors: list[str] = []

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        self._index = int(data["index"])
        return [self._suite.message(self._index, 0)]

    async def step(self, action: str) -> StepResult:
        self._doors.append(action)
        room = len(self._doors)
        if room < self._suite.rooms:
            return StepResult(self._suite.message(self._index, room), {})
        through = self._doors == list(self._suite.way(self._index))
        return StepResult(rewards={"through": float(through)}, done=True, correct=through)

    async def close(self) -> None:
        pass
