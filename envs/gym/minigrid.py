"""Suite of rooms of MiniGrid: keys, doors and goals in words, through the suite of gymnasium."""

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs.base import ChatMessage, Split
from envs.errors import EnvError
from envs.gym.rooms import FORMS, RoomState, state_of, ways
from envs.gym.suite import PROMPT, GymnasiumSuite

INSTALL = "pip install 'offbeat[minigrid]'"
ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle")
"""Actions of MiniGrid that a room takes where none are named; "done" is left out, which most rooms ignore."""
MOST_KNOWN = 100_000
"""States whose best action is kept, of all rooms together."""


class MiniGridSuite(GymnasiumSuite):
    """Suite of rooms of MiniGrid. A turn is an action, and an index is a seed; see `GymnasiumSuite`.

    An observation is the whole room. The reward of MiniGrid comes at the end, 1 - 0.9 * steps / limit of steps, and 0
    if the limit is reached.

    Args:
        id: the room, for example "MiniGrid-DoorKey-5x5-v0".
        kwargs: keyword arguments of the room; ``max_steps`` is its limit of steps.
        form: text of a room: "drawing" for language models, or "letters" for tiny ones. See `envs.gym.rooms`.
        actions: actions of MiniGrid that may be taken, by name. Empty: `ACTIONS`. With "letters", the name of each is
            its first letter.
        instruction, prompt, observation, role, seed: as in `GymnasiumSuite`. With "letters", an empty prompt is the
            observation alone.
        solved_at: smallest return of a solved episode.
        slips: share of the actions of a demonstration that are drawn at random, 0 to 1.

    Raises:
        EnvError: the package or the room is not there, or a setting is wrong.
    """

    def __init__(
        self,
        id: str,
        kwargs: dict[str, Any] | None = None,
        form: str = "drawing",
        actions: list[str] | None = None,
        instruction: str = "",
        prompt: str = "",
        observation: str = "{observation}",
        role: str = "tool",
        solved_at: float = 0.05,
        slips: float = 0.0,
        seed: int = 0,
    ) -> None:
        _import_minigrid()
        if form not in FORMS:
            raise EnvError(f"params.form = {form!r}: write one of {', '.join(FORMS)}")
        if not 0.0 <= slips <= 1.0:
            raise EnvError(f"params.slips = {slips}: write a share, 0 to 1")
        self._form, self._slips = form, slips
        self._chosen = tuple(actions or ACTIONS)
        names = [name[:1] for name in self._chosen] if form == "letters" else list(self._chosen)
        if len(set(names)) < len(names):
            raise EnvError(
                f"params.actions = {', '.join(self._chosen)}: two have one name; letters are first letters, so "
                "leave drop or done out"
            )
        self._names = names
        self._best: dict[RoomState, int] = {}
        start = prompt or ("{observation}" if form == "letters" else PROMPT)
        super().__init__(
            id, kwargs, names, instruction, start, observation, role, solved_at=solved_at, seed=seed
        )
        # A room that has no text in this form is refused before a run begins.
        sample = self.make()
        sample.reset(seed=0)
        sample.close()

    def make(self) -> Any:
        """Return a new room.

        Raises:
            EnvError: it cannot be made, or is no room of MiniGrid, or does not know an action.
        """
        return TextRoom(super().make(), self._form, self._chosen)

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return an episode of the shortest way to the reward, with slips. Blocks.

        Raises:
            LookupError: no way leads to the reward, or the room is too large to search.
        """
        rng = np.random.default_rng([self._seed, index, int(split == "heldout")])
        texts, actions = self._walk(rng, self.seed_of(index, split))
        talk = self.first(texts[0])
        for text, action in zip(texts[1:], actions, strict=False):
            talk += [{"role": "assistant", "content": self._names[action]}, self.later(text, 0.0)]
        return [*talk, {"role": "assistant", "content": self._names[actions[-1]]}]

    def _walk(self, rng: np.random.Generator, seed: int) -> tuple[list[str], list[int]]:
        """Return the texts of an episode but for the last one, and the action after each."""
        env = self.make()
        text, _ = env.reset(seed=seed)
        best = self._best_actions(env)
        texts, actions, over = [text], list[int](), False
        while not over:
            chosen = None if rng.random() < self._slips else best.get(env.state())
            actions.append(int(rng.integers(len(self._names))) if chosen is None else chosen)
            text, _, ended, truncated, _ = env.step(actions[-1])
            over = ended or truncated
            texts += [] if over else [text]
        env.close()
        return texts, actions

    def _best_actions(self, env: "TextRoom") -> dict[RoomState, int]:
        """Return the best action in states of this room and others. A room is searched once."""
        if self._slips < 1.0 and env.state() not in self._best:
            if len(self._best) > MOST_KNOWN:
                self._best.clear()
            self._best |= env.ways()
            if env.state() not in self._best:
                raise LookupError("no way leads from the start of this room to its reward")
        return self._best


class TextRoom:
    """A room of MiniGrid with a text as observation and some of its actions, with the interface of gymnasium.

    Args:
        env: the room, wrapped or not.
        form: a name of `envs.gym.rooms.FORMS`.
        actions: names of the actions, in the order of their numbers here.

    Raises:
        EnvError: this is no room of MiniGrid, or it has no such action.
    """

    def __init__(self, env: Any, form: str, actions: Sequence[str]) -> None:
        spaces = importlib.import_module("gymnasium.spaces")
        self._env, self._room, self._text = env, env.unwrapped, FORMS[form]
        known = getattr(self._room, "actions", None)
        if known is None or not hasattr(self._room, "agent_dir"):
            raise EnvError(
                f'params.id: {self._room} is no room of MiniGrid; env.name = "gymnasium" plays others'
            )
        wrong = [name for name in actions if name not in known.__members__]
        if wrong:
            raise EnvError(
                f"params.actions: no action {wrong[0]!r}; there are {', '.join(known.__members__)}"
            )
        self._numbers = [int(known[name]) for name in actions]
        self.observation_space, self.action_space = spaces.Text(10_000), spaces.Discrete(len(actions))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode in the room of a seed."""
        _, info = self._env.reset(seed=seed, options=options)
        return self._text(self._room), info

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one step."""
        _, reward, ended, truncated, info = self._env.step(self._numbers[action])
        return self._text(self._room), float(reward), bool(ended), bool(truncated), info

    def state(self) -> RoomState:
        """Return the present state."""
        return state_of(self._room)

    def ways(self) -> dict[RoomState, int]:
        """Return the number of the best action in each state; see `envs.gym.rooms.ways`."""
        here = {number: i for i, number in enumerate(self._numbers)}
        return {state: here[number] for state, number in ways(self._room, self._numbers).items()}

    def close(self) -> None:
        """Close the room."""
        self._env.close()


def _import_minigrid() -> None:
    """Import the package, which registers its rooms with gymnasium."""
    # Invariant: pygame, which minigrid draws with, would greet on the standard output of every role.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        importlib.import_module("minigrid")
    except ImportError as error:
        raise EnvError(
            f"env.name = 'minigrid' needs the package minigrid, which cannot be imported ({error}): {INSTALL}"
        ) from None
