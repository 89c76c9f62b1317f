"""Forms the rewards of an episode with tools: by the class's ``get_reward``, and by reward functions."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.errors import EnvError
from envs.rows.prompts import RawPrompt
from envs.rows.reading import DataRow
from envs.rows.reward_functions import RewardFunction, by_condition

OWN = "reward"
"""Name of the reward that ``get_reward`` returns as a number."""
ENVIRONMENTS = "environments"
"""Argument of a reward function that gets the object of the user's class, in a list of one, as TRL passes it."""


def unused(answer: str) -> float:
    """Stand in for a reward function, where only the rows of the suite `rows` are used."""
    raise AssertionError("no reward of the suite `rows` is asked for here")


def rewards_of(
    user: Any,
    functions: Sequence[RewardFunction],
    answer: str,
    row: DataRow,
    prompt: RawPrompt,
    finish: Callable[[Any, float | None], Any],
) -> dict[str, float]:
    """Return all rewards by name.

    Args:
        user: object of the user's class, or None.
        functions: reward functions of the run file.
        answer: the last answer of the model.
        row: row of the task.
        prompt: prompt of the row.
        finish: waits for a result if the function is a coroutine function, for at most so many seconds; None: as
            long as for a tool.

    Raises:
        EnvError: a reward is not a finite number, or every function returned None.
    """
    rewards = own_rewards(user, lambda given: finish(given, None))
    for function in by_condition(functions):
        if function.only_if and not rewards.get(function.only_if, 0.0) > 0:
            continue
        given = function.call(answer, row, prompt, {ENVIRONMENTS: user})
        value = function.value(finish(given, function.timeout_s))
        if value is not None:
            rewards[function.name] = value
    if not rewards:
        raise EnvError(f"{row.place}: every reward function returned None; one has to apply")
    return rewards


def own_rewards(user: Any, finish: Callable[[Any], Any] = lambda result: result) -> dict[str, float]:
    """Return what ``get_reward`` of the user's object returns; nothing if the object has no such method.

    Raises:
        EnvError: the method returned neither a finite number nor a table of such numbers.

    Example:
        >>> class Counter:
        ...     def get_reward(self): return 2
        >>> own_rewards(Counter()), own_rewards(None)
        ({'reward': 2.0}, {})
    """
    ask = getattr(user, "get_reward", None)
    if ask is None:
        return {}
    given = finish(ask())
    named = given if isinstance(given, Mapping) else {OWN: given}
    rewards: dict[str, float] = {}
    for name, value in named.items():
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise EnvError(
                f"{type(user).__name__}.get_reward returned {given!r:.80}; return a finite number, or a table of such "
                "numbers by name"
            )
        rewards[str(name)] = number
    return rewards
