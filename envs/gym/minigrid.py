"""Suite of rooms of MiniGrid: keys, doors and goals in words, through the suite of gymnasium."""

import importlib
import os
import string
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np

from envs.base import ChatMessage, Split
from envs.errors import EnvError
from envs.gym.suite import PROMPT, GymnasiumSuite

ARROWS = ">v<^"
"""Signs of the agent, by the number of the direction it looks in."""
DIRECTIONS = ("right", "down", "left", "up")
SIGNS = {"floor": ".", "key": "k", "ball": "o", "box": "b", "goal": "G", "lava": "~"}
"""Signs of what stands in a cell. A wall is "#" and an empty cell "."."""
UNCHANGING = ("wall", "floor", "goal", "lava")
"""Things that no action changes."""
DOORS = {"locked": "L", "closed": "D", "open": "/"}
"""Signs of doors."""
CELLS = string.ascii_letters + string.digits
"""Letters of the cells inside the outer walls, row by row."""
MOST_STATES = 5_000
"""States of a room that are searched for a way."""
RoomState = tuple[object, ...]
"""All that the future of a room depends on, but for its limit of steps."""


class Thing(NamedTuple):
    """Content of a cell, but walls and floors."""

    kind: str
    name: str
    """Text such as "locked yellow door"."""
    sign: str
    x: int
    """Column, from 0 at the left."""
    y: int
    """Row, from 0 at the top."""


def things(room: Any) -> list[Thing]:
    """Return what stands in a room, ordered by its kind, so that an opened door keeps its place."""
    found = []
    for y in range(room.grid.height):
        for x in range(room.grid.width):
            thing = room.grid.get(x, y)
            if thing is None or thing.type in ("wall", "floor"):
                continue
            door = _door(thing) if thing.type == "door" else ""
            name = f"{door} {thing.color} {thing.type}".strip()
            found.append(Thing(thing.type, name, DOORS.get(door) or SIGNS.get(thing.type, "?"), x, y))
    return sorted(found)


def drawing(room: Any) -> str:
    """Return a room as a text for people and language models: the plan, the things with their places, and the task.

    The plan shows the whole room, not the part that the agent sees.
    """
    plan = [
        ["#" if _is_wall(room, x, y) else "." for x in range(room.grid.width)]
        for y in range(room.grid.height)
    ]
    for thing in things(room):
        plan[thing.y][thing.x] = thing.sign
    x, y = map(int, room.agent_pos)
    plan[y][x] = ARROWS[int(room.agent_dir)]
    held = room.carrying
    rows = ["".join(row) for row in plan]
    places = "; ".join(f"{thing.name} at {thing.x},{thing.y}" for thing in things(room))
    carried = f"a {held.color} {held.type}" if held else "nothing"
    you = f"You are at {x},{y}, look {DIRECTIONS[int(room.agent_dir)]} and carry {carried}."
    return "\n".join([*rows, f"There is: {places}.", you, f"Task: {room.mission}."])


def letters(room: Any) -> str:
    """Return a room in few letters, for tiny models: the agent's cell, direction and load, then things and their cells.

    Walls and colours are left out. "e>-LfGikd" is: the agent in cell e looks right and carries nothing, a locked door
    is in f, the goal in i, a key in d.

    Raises:
        EnvError: there are more cells than letters.
    """
    wide, high = room.grid.width - 2, room.grid.height - 2
    if wide * high > len(CELLS):
        raise EnvError(
            f'params.form = "letters": a room of {wide} by {high} cells has more than {len(CELLS)}; choose a smaller '
            'room, or form = "drawing"'
        )

    def cell(x: int, y: int) -> str:
        if not (1 <= x <= wide and 1 <= y <= high):
            raise EnvError(
                f'params.form = "letters": the room has something in its outer wall, at {x},{y}, which has no letter; '
                'choose form = "drawing"'
            )
        return CELLS[(y - 1) * wide + x - 1]

    x, y = map(int, room.agent_pos)
    load = SIGNS.get(room.carrying.type, "?") if room.carrying else "-"
    seen = "".join(thing.sign + cell(thing.x, thing.y) for thing in things(room))
    return cell(x, y) + ARROWS[int(room.agent_dir)] + load + seen


FORMS: Mapping[str, Callable[[Any], str]] = {"drawing": drawing, "letters": letters}
"""Functions that make a text of a room, by the name of the form."""


def state_of(room: Any) -> RoomState:
    """Return the state of a room."""
    load = _with_content(room.carrying)
    hidden = tuple(
        _with_content(thing) for thing in room.grid.grid if thing is not None and thing.type == "box"
    )
    # Rooms that look alike may have different tasks.
    task = (room.mission, hidden)
    return (room.grid.encode().tobytes(), tuple(map(int, room.agent_pos)), int(room.agent_dir), load, task)


def _with_content(thing: Any) -> tuple[Any, ...]:
    """Return kind and colour of a thing, and what is in it; () for none."""
    return (thing.type, thing.color, _with_content(thing.contains)) if thing else ()


def ways(room: Any, actions: Sequence[int]) -> dict[RoomState, int]:
    """Return an action that leads to the reward in the fewest steps, for each state that leads to it at all.

    All states that copies of the room can get into are tried out. Blocks, for some tenths of a second.

    Args:
        actions: numbers of the actions that may be taken.

    Raises:
        LookupError: there are more than `MOST_STATES` states.
    """
    before, ends = _explored(room, actions)
    best: dict[RoomState, int] = {}
    untried = deque(ends)
    while untried:
        state, action = untried.popleft()
        if state not in best:
            best[state] = action
            untried.extend(before[state])
    return best


def _explored(
    room: Any, actions: Sequence[int]
) -> tuple[dict[RoomState, list[tuple[RoomState, int]]], list[tuple[RoomState, int]]]:
    """Return which states and actions lead to each state, and which ones to a reward."""
    before: dict[RoomState, list[tuple[RoomState, int]]] = defaultdict(list)
    ends: list[tuple[RoomState, int]] = []
    first = state_of(room)
    known, untried = {first}, deque([(first, room)])
    while untried:
        state, here = untried.popleft()
        for action in actions:
            there = _copy(here)
            _, reward, ended, *_ = there.step(action)
            if ended:
                ends += [(state, action)] if reward > 0 else []
                continue
            reached = state_of(there)
            before[reached].append((state, action))
            if reached not in known:
                if len(known) == MOST_STATES:
                    raise LookupError(f"a room with more than {MOST_STATES} states is not searched for a way")
                known.add(reached)
                untried.append((reached, there))
    return before, ends


def _copy(room: Any) -> Any:
    """Return a copy that has taken no steps. What never changes is shared."""
    still = [thing for thing in room.grid.grid if thing is not None and thing.type in UNCHANGING]
    fixed = (room.observation_space, room.action_space, room.spec, *still)
    copied = deepcopy(room, {id(part): part for part in fixed})
    copied.step_count = 0
    return copied


def _door(thing: Any) -> str:
    return "open" if thing.is_open else "locked" if thing.is_locked else "closed"


def _is_wall(room: Any, x: int, y: int) -> bool:
    thing = room.grid.get(x, y)
    return thing is not None and thing.type == "wall"


INSTALL = "pip install '.[minigrid]'"
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
        form: text of a room: "drawing" for language models, or "letters" for tiny ones. See `envs.gym.minigrid`.
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
        form: a name of `envs.gym.minigrid.FORMS`.
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
        """Return the number of the best action in each state; see `envs.gym.minigrid.ways`."""
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
