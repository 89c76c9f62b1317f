"""Suite of environments of skyrl-gym: each row is a task, and its column `env_class` names the environment."""

import importlib
from collections.abc import Mapping
from typing import Any, cast

from envs.base import ChatMessage, Env, Split, StepResult, SuiteFacts
from envs.errors import EnvError
from envs.reasoning_gym_suite import task_of
from envs.rows.reading import DataRow
from envs.rows.suite import RowsSuite

INSTALL = "pip install skyrl-gym"
CLASS = "env_class"
"""Column of SkyRL's data sets that names the environment."""
UNUSED = "envs.tools.episode:unused"
"""Reward function of the rows, which the environments replace."""


class SkyrlGymSuite:
    """Suite with one task for each row of a data set in SkyRL's form. The environment of a row gives the rewards.

    Args:
        train: rows, as in the suite `rows`. The environment gets all columns but the prompt.
        env_class: environment of rows without a column of this name, as for ``skyrl_gym.make``; also
            ``module:name`` for an environment that the module registers.
        config: settings of the environments, their ``env_config``.
        prompt, system, heldout, seed: as in the suite `rows`.
        max_turns: turns that an episode may have, for environments that take a number.
        solved_at: smallest return of a solved episode.

    Raises:
        EnvError: the package is not installed, or a row or a setting is wrong.
    """

    def __init__(
        self,
        train: str,
        env_class: str = "",
        config: dict[str, Any] | None = None,
        prompt: str = "prompt",
        system: str = "",
        heldout: str | float = 0.1,
        seed: int = 0,
        max_turns: int = 1,
        solved_at: float = 1.0,
    ) -> None:
        try:
            self._library = importlib.import_module("skyrl_gym")
        except ImportError as error:
            raise EnvError(
                f"env.name = 'skyrl_gym' needs the package skyrl-gym, which cannot be imported ({error}): {INSTALL}"
            ) from None
        self._rows = RowsSuite(train, UNUSED, prompt, system, heldout, seed=seed)
        self._class, self._config, self._prompt = env_class, config or {}, prompt
        self._max_turns, self.solved_at = max_turns, float(solved_at)
        if not env_class and CLASS not in self._rows.columns["train"]:
            raise EnvError(f"params.env_class: the rows have no column {CLASS!r}; name the environment here")

    find_files = staticmethod(RowsSuite.find_files)
    fingerprint = staticmethod(RowsSuite.fingerprint)

    @staticmethod
    def files(params: dict[str, Any]) -> list[str]:
        """Return the files that make the tasks."""
        return RowsSuite.files(params)

    def episode(self) -> Env:
        return cast(Env, _SkyrlGymEpisode(self))

    def begin(self, index: int, split: Split) -> tuple[Any, list[ChatMessage], DataRow]:
        """Return the environment of a task, its first messages and its row.

        Raises:
            EnvError: the environment cannot be made.
        """
        row, _, messages = self._rows.begin(index, split)
        name = str(row.values.get(CLASS) or self._class)
        extras = {key: value for key, value in row.values.items() if key != self._prompt}
        try:
            env = self._library.make(
                name, env_config=dict(self._config), extras={"max_turns": self._max_turns, **extras}
            )
        except Exception as error:
            raise EnvError(f"{row.place}: environment {name!r}: {type(error).__name__}: {error}") from error
        messages, _ = env.init(messages)
        return env, list(messages), row

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a row's prompt and its column `answer` or `completion`, as in the suite `rows`."""
        return self._rows.demonstration(index, split)

    def facts(self) -> SuiteFacts:
        """Return the numbers of rows, and the name of the reward."""
        rows = self._rows.facts()
        return SuiteFacts(
            heldout_tasks=rows.heldout_tasks, reward_names=("reward",), train_tasks=rows.train_tasks
        )

    async def close(self) -> None:
        await self._rows.close()


class _SkyrlGymEpisode:
    """Episode of one environment. Its functions are plain ones, because environments run tools."""

    def __init__(self, suite: SkyrlGymSuite) -> None:
        self._suite = suite
        self._env: Any = None
        self._place, self._return = "", 0.0

    def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        self._env, messages, row = self._suite.begin(*task_of(data))
        self._place = row.place
        return messages

    def step(self, action: str) -> StepResult:
        assert self._env is not None, "step before reset"
        output: Mapping[str, Any] = self._env.step(action)
        reward, done = float(output["reward"]), bool(output["done"])
        self._return += reward
        return StepResult(
            observation=None if done else list(output["observations"]),
            rewards={"reward": reward},
            done=done,
            correct=self._return >= self._suite.solved_at if done else None,
            info={"row": self._place, **(output.get("metadata") or {})},
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
