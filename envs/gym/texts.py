"""Observations of gymnasium as texts, and the action that a text of the model names. Imports gymnasium nowhere."""

import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from envs.errors import EnvError

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
