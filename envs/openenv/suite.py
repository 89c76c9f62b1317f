"""Suite of one environment behind an OpenEnv server: observations become texts, and the text of a turn an action."""

import json
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from envs.base import ChatMessage, Env, Split, StepResult, SuiteFacts
from envs.errors import EnvError
from envs.gym.suite import ROLES
from envs.gym.texts import filled, written
from envs.openenv.connection import ActionRefused, Observed, OpenEnvSession
from envs.reasoning_gym_suite import opening, task_of
from envs.tools.calls import without_thought
from envs.user_code import code_files, load_callable, with_code_beside

NAMED = ("observe", "parse")
"""Parameters that may name code of the user's."""


class OpenEnvSuite:
    """Suite of one OpenEnv server. A turn is an action, and the index of a task gives its seed.

    Args:
        url: address of the server, ``http://HOST:PORT``.
        action: field of the action that gets the text of a turn, without its thought.
        fields: further fields of every action.
        parse: function ``(text)`` that returns the action as a table, or None if the text names none, as
            ``file.py:function``. It replaces ``action``.
        observe: function ``(observation)`` that returns a text of the observation's table, as ``file.py:function``.
            Empty: the field ``field``, or the whole table.
        field: field of the observation that the model reads. Empty: all fields, with their names.
        reset: further fields of the reset, beside the seed.
        instruction: text of a system message. Empty: there is none.
        prompt: text of the first user message, with ``{observation}``.
        observation: text of every later observation, with ``{observation}`` and ``{reward}``.
        role: role of later observations, "tool" or "user". Some chat templates refuse one of them.
        solved_at: smallest return of a solved episode. None: evaluations know no solved tasks.
        seed: number from which seeds are counted: those of training are even, those of held-out tasks odd.
        timeout_s: longest time of one call of the server, in seconds. ``actor.env_timeout_s`` has to be longer.

    Raises:
        EnvError: a setting is wrong.
    """

    def __init__(
        self,
        url: str,
        action: str = "",
        fields: dict[str, Any] | None = None,
        parse: str = "",
        observe: str = "",
        field: str = "",
        reset: dict[str, Any] | None = None,
        instruction: str = "",
        prompt: str = "{observation}",
        observation: str = "{observation}",
        role: str = "tool",
        solved_at: float | None = None,
        seed: int = 0,
        timeout_s: float = 25.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise EnvError(f"params.url = {url!r}: write the address of a server, as http://127.0.0.1:8000")
        if role not in ROLES:
            raise EnvError(f"params.role = {role!r}: write one of {', '.join(ROLES)}")
        if bool(action) == bool(parse):
            raise EnvError(
                "write one of params.action, a field of the environment's actions, and params.parse"
            )
        if not timeout_s > 0:
            raise EnvError(f"params.timeout_s = {timeout_s!r}: write a number above 0")
        self._url, self._action, self._fields, self._field = url, action, fields or {}, field
        self._parse = load_callable(parse, "parse") if parse else None
        self._observe = load_callable(observe, "observe") if observe else None
        self._reset, self._instruction, self._prompt = reset or {}, instruction, prompt
        self._observation, self._role, self._seed = observation, role, seed
        self.solved_at, self._timeout_s = solved_at, float(timeout_s)
        self.first(Observed({}, None, done=False))
        self.later(Observed({}, None, done=False))

    @staticmethod
    def find_files(params: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return the params with the paths by which every role finds the files; see `envs.registry.beside`."""
        return with_code_beside(params, NAMED, folder)

    @staticmethod
    def files(params: dict[str, Any]) -> list[str]:
        """Return the files of the user's code."""
        return code_files(params, NAMED)

    def episode(self) -> Env:
        return cast(Env, _OpenEnvEpisode(self, OpenEnvSession(self._url, self._timeout_s)))

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Raise LookupError: OpenEnv has no solutions."""
        raise LookupError("environments of OpenEnv come without solutions; name a model with model.path")

    def facts(self) -> SuiteFacts:
        """Return the name of the reward."""
        remarks = []
        if self.solved_at is None:
            remarks = ["evaluations cannot tell which tasks are solved: set env.params.solved_at to a return"]
        return SuiteFacts(reward_names=("reward",), remarks=tuple(remarks))

    async def close(self) -> None:
        return None

    def reset_of(self, index: int, split: Split) -> dict[str, Any]:
        """Return the data of a task's reset, with its seed."""
        return {"seed": (self._seed + index) % 2**30 * 2 + (split == "heldout"), **self._reset}

    def action_of(self, text: str) -> dict[str, Any] | None:
        """Return the action of a turn; None if it names none."""
        if self._parse is None:
            return {**self._fields, self._action: without_thought(text).strip()}
        action = self._parse(text)
        return None if action is None else {**self._fields, **action}

    def first(self, seen: Observed) -> list[ChatMessage]:
        """Return the first messages of an episode."""
        return opening(filled(self._prompt, "prompt", {"observation": self._text(seen)}), self._instruction)

    def later(self, seen: Observed) -> ChatMessage:
        """Return the message of a later observation."""
        fields = {"observation": self._text(seen), "reward": f"{seen.reward or 0.0:g}"}
        return {"role": self._role, "content": filled(self._observation, "observation", fields)}

    def refused(self, why: str) -> ChatMessage:
        """Return what the model reads behind a turn that is no action."""
        return {"role": self._role, "content": f"This is no action of the environment. {why}".strip()}

    def _text(self, seen: Observed) -> str:
        table = seen.observation
        if not table:
            return ""
        if self._observe is not None:
            return str(self._observe(table))
        if not self._field:
            return written({name: _plain(value) for name, value in table.items()})
        if self._field not in table:
            raise EnvError(f"params.field = {self._field!r}: an observation has {', '.join(table)}")
        return str(_plain(table[self._field]))


class _OpenEnvEpisode:
    def __init__(self, suite: OpenEnvSuite, session: OpenEnvSession) -> None:
        self._suite, self._session = suite, session
        self._return, self._refused = 0.0, 0

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        return self._suite.first(await self._session.reset(self._suite.reset_of(*task_of(data))))

    async def step(self, action: str) -> StepResult:
        chosen = self._suite.action_of(action)
        if chosen is None:
            return self._no_action("")
        try:
            seen = await self._session.step(chosen)
        except ActionRefused as error:
            return self._no_action(str(error))
        reward = seen.reward or 0.0
        self._return += reward
        if not seen.done:
            return StepResult(self._suite.later(seen), rewards={"reward": reward}, info=self._info())
        least = self._suite.solved_at
        correct = None if least is None else self._return >= least
        return StepResult(rewards={"reward": reward}, done=True, correct=correct, info=self._info())

    async def close(self) -> None:
        await self._session.close()

    def _no_action(self, why: str) -> StepResult:
        self._refused += 1
        return StepResult(self._suite.refused(why), rewards={"reward": 0.0}, info=self._info())

    def _info(self) -> dict[str, Any]:
        return {"return": self._return, "refused_actions": self._refused}


def _plain(value: Any) -> Any:
    """Return a value of JSON as `written` takes it: maps and lists inside become JSON."""
    return value if isinstance(value, str | int | float | None) else json.dumps(value, ensure_ascii=False)
