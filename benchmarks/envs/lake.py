"""Frozen lakes of gymnasium in two letters per observation: one reward at the end, and states that are met again.

An observation is the letter of the lake and the letter of the cell, for example "Ak". An action is one of the letters
l, d, r and u. The ice is not slippery. A hole ends the episode, and only the last cell earns something. So a reward
is rare, it comes after many turns, and members of a group pass the same cells.
"""

import string
from functools import lru_cache
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from envs.base import ChatMessage, Env, Split, SuiteFacts
from envs.errors import EnvError
from envs.gym.suite import GymnasiumSuite

ACTIONS = ["l", "d", "r", "u"]
"""Names of the actions of FrozenLake, in the order of their numbers."""
CELLS = string.ascii_lowercase + string.digits
"""Letters of the cells, row by row."""
LAKES = string.ascii_uppercase
"""Letters of the lakes."""
DRAWS = 1_000
"""Most maps that are drawn in search of different ones."""


@lru_cache
def lake_maps(size: int, ice: float, lakes: int) -> tuple[tuple[str, ...], ...]:
    """Return the rows of each lake. gymnasium draws maps that have a way from the first cell to the last.

    Raises:
        EnvError: there are not so many different maps of this kind.

    Example:
        >>> maps = lake_maps(4, 0.8, 3)
        >>> len(set(maps)), maps[0][0][0], maps[0][-1][-1]
        (3, 'S', 'G')
    """
    # Two seeds may draw one map. A dictionary keeps each once, in the order of seeds.
    maps: dict[tuple[str, ...], None] = {}
    for seed in range(DRAWS):
        maps[tuple(generate_random_map(size, ice, seed=seed))] = None
        if len(maps) == lakes:
            return tuple(maps)
    raise EnvError(
        f"lakes = {lakes}: {DRAWS} draws gave {len(maps)} different maps of size {size}; lower lakes or ice"
    )


class Lakes:
    """Several frozen lakes, with the interface of gymnasium. The seed of `reset` chooses the lake.

    Args:
        size: cells on each side, at most 6.
        ice: probability that a cell is ice and no hole.
        lakes: number of different lakes, at most 26.
        most_steps: steps after which an episode is truncated.
    """

    def __init__(self, size: int = 4, ice: float = 0.8, lakes: int = 4, most_steps: int = 16) -> None:
        self.observation_space = spaces.Text(2, charset=LAKES + CELLS)
        self.action_space = spaces.Discrete(len(ACTIONS))
        self._size, self._ice, self._lakes, self._most_steps = size, ice, lakes, most_steps
        self._lake, self._steps = 0, 0
        self._game: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode on the lake of a seed. Training has even seeds and evaluation odd ones, of all lakes."""
        self._lake, self._steps = (seed or 0) // 2 % self._lakes, 0
        rows = lake_maps(self._size, self._ice, self._lakes)[self._lake]
        self._game = FrozenLakeEnv(desc=list(rows), is_slippery=False)
        cell, info = self._game.reset(seed=seed)
        return self._seen(cell), info

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one step."""
        cell, reward, ended, _, info = self._game.step(action)
        self._steps += 1
        return self._seen(cell), float(reward), bool(ended), self._steps >= self._most_steps, info

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _seen(self, cell: int) -> str:
        return LAKES[self._lake] + CELLS[int(cell)]


class LakeSuite:
    """The lakes in words: the shipped suite `gymnasium`, and random walks as demonstrations.

    Random walks teach the form of a turn and favour no way.

    Args:
        size, ice, lakes, most_steps: see `Lakes`.
        seed: seed of the tasks and of the walks.

    Raises:
        EnvError: there are more cells or lakes than letters, or fewer different maps than lakes.
    """

    def __init__(
        self, size: int = 4, ice: float = 0.8, lakes: int = 4, most_steps: int = 16, seed: int = 0
    ) -> None:
        if not 2 <= size <= 6 or not 1 <= lakes <= len(LAKES):
            raise EnvError(
                f"size = {size}, lakes = {lakes}: choose a size from 2 to 6, and 1 to {len(LAKES)} lakes"
            )
        lake_maps(size, ice, lakes)
        self._seed = seed
        self._suite = GymnasiumSuite(
            f"{__file__}:Lakes",
            kwargs={"size": size, "ice": ice, "lakes": lakes, "most_steps": most_steps},
            actions=ACTIONS,
            prompt="{observation}",
            solved_at=1.0,
            seed=seed,
        )

    def episode(self) -> Env:
        return self._suite.episode()

    def facts(self) -> SuiteFacts:
        """Return the name of the reward, and that every turn has an anchor."""
        return self._suite.facts()

    def gauges(self) -> dict[str, float]:
        return self._suite.gauges()

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a random walk."""
        rng = np.random.default_rng([self._seed, index])
        env = self._suite.make()
        seen, _ = env.reset(seed=self._suite.seed_of(index, split))
        talk, over = self._suite.first(seen), False
        while not over:
            action = int(rng.integers(len(ACTIONS)))
            seen, reward, ended, truncated, _ = env.step(action)
            talk.append({"role": "assistant", "content": ACTIONS[action]})
            over = ended or truncated
            talk += [] if over else [self._suite.later(seen, reward)]
        return talk

    async def close(self) -> None:
        await self._suite.close()
