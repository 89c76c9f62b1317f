"""What a request says about the sampling of its answer. Pure.

The bound on its length is obeyed. Everything else is the learner's: it is recorded, and the answers that do not do what
was demanded are counted.
"""

from collections.abc import Mapping
from typing import Any

from envs.errors import EnvError

RECORDED = ("temperature", "top_p", "top_k", "seed", "tool_choice")
"""Settings that the trajectory's info tells, and that nobody obeys."""
BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SHOWN = 64
"""Characters of a setting that are recorded."""


def limit_in(content: Mapping[str, Any]) -> int | None:
    """Return the smallest of the bounds that a request sets on its answer; None if it sets none.

    Raises:
        EnvError: a bound is no whole number of at least 1.

    Example:
        >>> limit_in({"max_tokens": 9, "max_completion_tokens": 5})
        5
    """
    given = {name: content[name] for name in BOUNDS if content.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise EnvError(f"{name} = {value!r:.200}: give a whole number of at least 1")
    return min(given.values(), default=None)


def settings_in(content: Mapping[str, Any]) -> dict[str, str | float]:
    """Return the settings of a request that are recorded.

    Example:
        >>> settings_in({"temperature": 0.2, "seed": None, "tool_choice": {"type": "any"}})
        {'temperature': 0.2, 'tool_choice': 'any'}
    """
    found: dict[str, str | float] = {}
    for name in RECORDED:
        value = content.get(name)
        value = value.get("type") if isinstance(value, Mapping) else value
        if isinstance(value, int | float):
            found[name] = value
        elif isinstance(value, str):
            found[name] = value[:SHOWN]
    return found


def demands_call(content: Mapping[str, Any]) -> bool:
    """Return whether a request wants an answer with a tool call.

    Example:
        >>> [demands_call({"tool_choice": choice}) for choice in ("required", "auto", {"type": "tool"}, None)]
        [True, False, True, False]
    """
    choice = content.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    return kind in ("required", "any", "function", "tool")


def fields_ignored(content: Mapping[str, Any], *read: str) -> int:
    """Return how many fields of a request nobody reads.

    Args:
        read: the fields that its route reads, apart from those of this module.

    Example:
        >>> fields_ignored({"messages": [], "seed": 1, "store": False, "metadata": {}}, "messages")
        2
    """
    return len(set(content) - {"model", "tools", "stream", *RECORDED, *BOUNDS, *read})
