"""Suite of one environment of gymnasium: observations become texts, and the text of a turn names an action."""

import importlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from envs.base import ChatMessage, Env, Split, StepResult, SuiteFacts
from envs.errors import EnvError
from envs.reasoning_gym_suite import opening, task_of
from envs.user_code import code_file, code_files, in_one_line, load_callable, with_code_beside
from protocol.gauges import Gauge, table

LARGEST = 64
"""Numbers of an observation that are written out; larger ones need a function of the user's."""
DIGITS = 4
"""Significant digits of a number."""
LONGEST_MARK = 256
"""Characters of a mark; see `envs.base.StepResult`."""
_COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)
_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def plain(drawing: str) -> str:
    """Return a drawing for terminals without its codes. What has a colour stands in brackets.

    Example:
        >>> plain("S\\x1b[41mF\\x1b[0mH\\nFFG\\n")
        'S[F]H\\nFFG'
    """
    return _CODE.sub("", _COLOURED.sub(r"[\1]", drawing)).strip("\n")


def written(value: Any) -> str:
    """Return an observation as a text: numbers, arrays, texts, and tuples and maps of these.

    Example:
        >>> written((14, 10, 0)), written({"goal": 3, "at": [0.5, 1.0]}), written("a maze")
        ('14, 10, 0', 'goal: 3, at: [0.5, 1]', 'a maze')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {written(part)}" for name, part in value.items())
    if isinstance(value, tuple):
        return ", ".join(written(part) for part in value)
    # Numpy's arrays and numbers become lists and numbers of Python.
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return "[" + ", ".join(written(part) for part in value) + "]"
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)


def anchor(text: str) -> str:
    """Return the mark "anchor" of a state: the text of its observation, or a hash of a long one.

    Example:
        >>> anchor("a door"), len(anchor("a long corridor, " * 50))
        ('a door', 32)
    """
    return text if len(text) <= LONGEST_MARK else blake2b(text.encode(), digest_size=16).hexdigest()


def refuse_large(space: Any) -> None:
    """Refuse an observation space whose observations would be long texts, such as images.

    Raises:
        EnvError: the text names the space and the cure.
    """
    parts = getattr(space, "spaces", None)
    if parts is not None:
        for part in parts.values() if isinstance(parts, Mapping) else parts:
            refuse_large(part)
        return
    kind, shape = type(space).__name__, getattr(space, "shape", None) or ()
    size = 1
    for length in shape:
        size *= int(length)
    if kind not in ("Discrete", "Box", "MultiDiscrete", "MultiBinary", "Text") or size > LARGEST:
        raise EnvError(
            f"params.observe: an observation of {kind} with {size} numbers is no text; at most {LARGEST} numbers are "
            "written out. Name a function that makes a text of an observation, file.py:function, or set "
            'kwargs = {render_mode = "ansi"} if the environment can draw itself as a text'
        )


def action_names(space: Any, names: Sequence[str]) -> dict[str, int]:
    """Return the actions of a Discrete space by name; their numbers are the names if none are given.

    Raises:
        EnvError: there are not as many names as actions, or two are equal.

    Example:
        >>> from types import SimpleNamespace
        >>> space = SimpleNamespace(n=2, start=1)
        >>> action_names(space, []), action_names(space, ["left", "right"])
        ({'1': 1, '2': 2}, {'left': 1, 'right': 2})
    """
    start, count = int(space.start), int(space.n)
    made = [str(start + i) for i in range(count)] if not names else list(names)
    if len(made) != count or len({name.casefold().strip() for name in made}) != count or "" in made:
        raise EnvError(
            f"params.actions = {names!r:.200}: the environment has {count} actions; give each a name of its own"
        )
    return {name: start + i for i, name in enumerate(made)}


def finder(names: Mapping[str, int]) -> Callable[[str], int | None]:
    """Return a function that finds the last name of an action in a text, as a whole word; None if there is none.

    Example:
        >>> find = finder({"left": 0, "right": 1, "go up": 2})
        >>> find("Not left, I take Right."), find("go up"), find("lefty"), find("")
        (1, 2, None, None)
        >>> finder({"0": 0, "1": 1, "10": 10})("I could take -1, but I take 10")
        10
    """
    numbers = {name.casefold(): number for name, number in names.items()}
    # A longer name stands before one that it contains.
    longest = sorted(numbers, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, longest))})(?!\w)")

    def find(text: str) -> int | None:
        found = pattern.findall(text.casefold())
        return numbers[found[-1]] if found else None

    return find


def filled(template: str, name: str, fields: Mapping[str, object]) -> str:
    """Return a template with fields in the places of their names in braces.

    Args:
        name: parameter of the template, for errors.

    Raises:
        EnvError: the template names a field that there is not.

    Example:
        >>> filled("You see {observation}.", "observation", {"observation": "a wall"})
        'You see a wall.'
    """
    try:
        return template.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise EnvError(
            f"params.{name} = {template!r:.200}: {error}; its fields are {', '.join(fields)}"
        ) from None


GAUGES = table(
    [
        Gauge(
            "actions_unknown_total",
            "turns",
            "turns that name no action, of `gymnasium` and `minigrid`",
            "total",
        )
    ]
)
"""Gauges of the suite."""
INSTALL = "pip install '.[gym]'"
PROMPT = "{observation}\n\nActions: {actions}. Answer with one of them."
PROMPT_OF_TEXT = "{observation}"
UNKNOWN = "This names no action. Actions: {actions}."
NAMED = ("id", "observe", "parse")
"""Parameters that may name code of the user's."""
ROLES = ("tool", "user")


class SuiteOfReturns:
    """Base of suites whose episodes are played for a return, with code of the user and no solutions."""

    LIBRARY = "gymnasium"
    """Whose environments they are."""
    CODE: tuple[str, ...] = NAMED
    """Parameters that may name code of the user's."""
    MARKS: tuple[str, ...] | None = None
    """Names of the marks that every turn has."""
    solved_at: float | None
    """Smallest return of a solved episode; None: it is not known."""

    @classmethod
    def find_files(cls, params: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return the params with the paths by which every role finds the files; see `envs.registry.beside`."""
        return with_code_beside(params, cls.CODE, folder)

    @classmethod
    def files(cls, params: dict[str, Any]) -> list[str]:
        """Return the files of the user's code."""
        return code_files(params, cls.CODE)

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Raise LookupError: these environments have no solutions."""
        raise LookupError(
            f"environments of {self.LIBRARY} come without solutions; name a model with model.path"
        )

    def facts(self) -> SuiteFacts:
        """Return the names of the reward and of the marks."""
        remarks = []
        if self.solved_at is None:
            remarks = ["evaluations cannot tell which tasks are solved: set env.params.solved_at to a return"]
        return SuiteFacts(reward_names=("reward",), remarks=tuple(remarks), mark_names=self.MARKS)

    def solved(self, total: float) -> bool | None:
        """Return whether a return solves a task; None if that is not known."""
        return None if self.solved_at is None else total >= self.solved_at

    async def close(self) -> None:
        return None


class GymnasiumSuite(SuiteOfReturns):
    """Suite of one environment of gymnasium. A turn is an action, and an index is a seed.

    Args:
        id: the environment, as for ``gymnasium.make``; or ``file.py:Class`` or ``file.py:function``, which is called
            with ``kwargs`` and returns one.
        kwargs: keyword arguments of the environment. With ``render_mode = "ansi"``, the text of an observation is what
            the environment draws.
        actions: names of the actions of a Discrete space, in the order of their numbers. Empty: the numbers.
        instruction: text of a system message. Empty: there is none.
        prompt: text of the first user message, with ``{observation}`` and ``{actions}``. Empty: a sentence with both.
        observation: text of every later observation, with ``{observation}``, ``{actions}`` and ``{reward}``.
        role: role of later observations, "tool" or "user". Some chat templates refuse one of them.
        observe: function ``(observation, info)`` that returns a text, as ``file.py:function``. Empty: numbers and
            texts are written out.
        parse: function ``(text)`` that returns the action in what the model wrote, or None if there is none.
            Empty: the last name of an action in it; for a Text space, the text itself.
        solved_at: smallest return of a solved episode. None: the environment's registered ``reward_threshold``.
        seed: seed of the tasks.

    Raises:
        EnvError: the package or the environment is not there, or a setting is wrong.
    """

    MARKS = ("anchor",)

    def __init__(
        self,
        id: str,
        kwargs: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        instruction: str = "",
        prompt: str = "",
        observation: str = "{observation}",
        role: str = "tool",
        observe: str = "",
        parse: str = "",
        solved_at: float | None = None,
        seed: int = 0,
    ) -> None:
        if role not in ROLES:
            raise EnvError(f"params.role = {role!r}: write one of {', '.join(ROLES)}")
        loaded: dict[str, ModuleType] = {}
        self._make = _maker(id, kwargs or {}, loaded)
        self._draws = (kwargs or {}).get("render_mode") == "ansi"
        self._observe = load_callable(observe, "observe", loaded) if observe else None
        self._instruction, self._template, self.role, self._seed = instruction, observation, role, seed
        sample = self.make()
        try:
            self.parse, self._actions = self._parser(sample.action_space, parse, actions or [], loaded)
            self._prompt = prompt or (PROMPT if self._actions else PROMPT_OF_TEXT)
            if not observe and not self._draws:
                refuse_large(sample.observation_space)
            threshold = getattr(sample.spec, "reward_threshold", None) if solved_at is None else solved_at
        finally:
            sample.close()
        self.solved_at = None if threshold is None else float(threshold)
        self.first("")
        self.later("", 0.0)
        self._counting = threading.Lock()
        self._unknown = 0

    def episode(self) -> Env:
        return cast(Env, _GymnasiumEpisode(self))

    def gauges(self) -> dict[str, float]:
        """Return the number of turns that named no action."""
        return {"actions_unknown_total": float(self._unknown)}

    def make(self) -> Any:
        """Return a new environment.

        Raises:
            EnvError: it cannot be made.
        """
        try:
            return self._make()
        except Exception as error:
            raise EnvError(f"the environment cannot be made: {in_one_line(error)}") from error

    def seed_of(self, index: int, split: Split) -> int:
        """Return the seed of a task, 0 to 2^31 - 1. Those of training are even, those of held-out tasks odd."""
        digest = blake2b(f"{self._seed} {split} {index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % 2**30 * 2 + (split == "heldout")

    def text(self, env: Any, observation: Any, info: dict[str, Any]) -> str:
        """Return the text of an observation."""
        if self._observe is not None:
            return str(self._observe(observation, info))
        return plain(str(env.render())) if self._draws else written(observation)

    def first(self, text: str) -> list[ChatMessage]:
        """Return the first messages of an episode."""
        fields = {"observation": text, "actions": self._actions}
        return opening(filled(self._prompt, "prompt", fields), self._instruction)

    def later(self, text: str, reward: float) -> ChatMessage:
        """Return the message of a later observation."""
        fields = {"observation": text, "actions": self._actions, "reward": f"{reward:g}"}
        return {"role": self.role, "content": filled(self._template, "observation", fields)}

    def unknown(self) -> ChatMessage:
        """Count a turn without an action. Return what the model reads."""
        with self._counting:
            self._unknown += 1
        text = UNKNOWN.format(actions=self._actions) if self._actions else "This is no action."
        return {"role": self.role, "content": text}

    def _parser(
        self, space: Any, parse: str, actions: list[str], loaded: dict[str, ModuleType]
    ) -> tuple[Callable[[str], Any], str]:
        """Return the function that finds an action in a text, and the names of the actions."""
        kind = type(space).__name__
        if actions and kind != "Discrete":
            raise EnvError(f"params.actions: the actions of a {kind} space have no names; set params.parse")
        names = action_names(space, actions) if kind == "Discrete" else {}
        if parse:
            return load_callable(parse, "parse", loaded), ", ".join(names)
        if names:
            return finder(names), ", ".join(names)
        if kind == "Text":
            return lambda text: text if space.contains(text) else None, ""
        raise EnvError(
            f"params.parse: the environment has actions of {kind}; name a function that makes one of a text, "
            "file.py:function"
        )


class _GymnasiumEpisode:
    """Episode of one environment. Its functions are plain ones, because environments compute."""

    def __init__(self, suite: GymnasiumSuite) -> None:
        self._suite = suite
        self._env: Any = None
        self._return, self._steps, self._unknown = 0.0, 0, 0
        self._anchor = ""

    def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        self._env = self._suite.make()
        observation, info = self._env.reset(seed=self._suite.seed_of(*task_of(data)))
        text = self._suite.text(self._env, observation, info)
        self._anchor = anchor(text)
        return self._suite.first(text)

    def step(self, action: str) -> StepResult:
        assert self._env is not None, "step before reset"
        # The mark is the state that this action was taken in: the observation before it.
        marks: dict[str, str | float] = {"anchor": self._anchor}
        return replace(self._answer(action), marks=marks)

    def _answer(self, action: str) -> StepResult:
        chosen = self._suite.parse(action)
        if chosen is None:
            self._unknown += 1
            return StepResult(self._suite.unknown(), rewards={"reward": 0.0}, info=self._info("open"))
        observation, reward, terminated, truncated, info = self._env.step(chosen)
        reward = float(reward)
        self._return += reward
        self._steps += 1
        if terminated or truncated:
            end = "terminated" if terminated else "truncated"
            return StepResult(
                rewards={"reward": reward},
                done=True,
                correct=self._suite.solved(self._return),
                info=self._info(end),
            )
        text = self._suite.text(self._env, observation, info)
        self._anchor = anchor(text)
        return StepResult(
            self._suite.later(text, reward), rewards={"reward": reward}, info=self._info("open")
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _info(self, end: str) -> dict[str, Any]:
        return {"end": end, "return": self._return, "steps": self._steps, "unknown_actions": self._unknown}


def _maker(id: str, kwargs: dict[str, Any], loaded: dict[str, ModuleType]) -> Callable[[], Any]:
    """Return a function that makes the environment.

    Raises:
        EnvError: the package is not installed.
    """
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError as error:
        raise EnvError(
            f"env.name = 'gymnasium' needs the package gymnasium, which cannot be imported ({error}): {INSTALL}"
        ) from None
    if code_file(id):
        own = load_callable(id, "environment", loaded)
        return lambda: own(**kwargs)
    return lambda: gymnasium.make(id, disable_env_checker=True, **kwargs)
