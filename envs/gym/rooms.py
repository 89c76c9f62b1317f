"""Rooms of MiniGrid as texts, and the ways through them. Imports minigrid nowhere.

A room is a ``minigrid.minigrid_env.MiniGridEnv``: a grid of cells in which an agent stands, looks in one of four
directions, and carries at most one thing.
"""

import string
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from envs.errors import EnvError

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
    """What stands in a cell, but walls and floors."""

    kind: str
    name: str
    """For example "locked yellow door"."""
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
