"""One episode with tools: the model calls them until it answers without a call, and its rewards are formed."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Protocol, cast

from envs.base import ChatMessage, StepResult, ToolSchema
from envs.calls import Call, final_text, find_calls
from envs.errors import EnvError
from envs.rows.prompts import RawPrompt, target_of
from envs.rows.reading import DataRow
from envs.rows.reward_functions import RewardFunction, by_condition
from envs.tools.toolbox import Tool, answer

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


@dataclass
class CallCounts:
    """Counters of a suite, for all its episodes."""

    calls: int = 0
    unreadable: int = 0
    failed: int = 0
    # Invariant: episodes count in threads of their own, each under this lock.
    lock: Lock = field(default_factory=Lock)

    def add(self, call: Call, failed: bool) -> None:
        with self.lock:
            self.calls += 1
            self.unreadable += bool(call.error)
            self.failed += failed and not call.error


class Offer(Protocol):
    """The side of a suite that its episodes use; see `envs.tools.suite.ToolsSuite`."""

    @property
    def max_turns(self) -> int: ...
    @property
    def counts(self) -> CallCounts: ...
    def user(self) -> tuple[Any, dict[str, Tool]]: ...
    def begin(self, data: dict[str, Any]) -> tuple[DataRow, RawPrompt, list[ChatMessage]]: ...
    def score(
        self, user: Any, answer: str, row: DataRow, prompt: RawPrompt
    ) -> tuple[dict[str, float], bool | None]: ...
    def finish(self, result: Any) -> Any: ...


class ToolsEpisode:
    """An episode with tools.

    Its functions are plain ones. The actor runs them in a thread, so tools may block.
    """

    def __init__(self, suite: Offer) -> None:
        self._suite = suite
        self._user: Any = None
        self._tools: dict[str, Tool] = {}
        self._schemas: dict[str, ToolSchema] = {}
        self._begun: tuple[DataRow, RawPrompt] | None = None
        self._turns = self._calls = self._failed = 0

    def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        """Return the prompt of the task's row, with the text that the user's ``reset`` returns behind it."""
        row, prompt, messages = self._suite.begin(data)
        self._begun = row, prompt
        self._user, self._tools = self._suite.user()
        self._schemas = {name: tool.schema for name, tool in self._tools.items()}
        begin = getattr(self._user, "reset", None)
        if begin is None:
            return messages
        text = self._suite.finish(begin(**taken(begin, row.values)))
        if text is not None and not isinstance(text, str):
            raise EnvError(f"{type(self._user).__name__}.reset returned {text!r:.200}; return a text or None")
        last = messages[-1]
        return [*messages[:-1], cast(ChatMessage, {**last, "content": last["content"] + (text or "")})]

    def tool_schemas(self) -> list[ToolSchema]:
        """Return the schemas of all tools."""
        return list(self._schemas.values())

    def step(self, action: str) -> StepResult:
        """Run the calls of an answer, and return all results in one observation. No call ends the episode."""
        self._turns += 1
        calls = find_calls(action, self._schemas)
        results = [self._result(call) for call in calls]
        marks: dict[str, str | float] = {"calls": float(len(calls))}
        if not calls:
            return replace(self._end("answered", action), marks=marks)
        if self._turns >= self._suite.max_turns:
            return replace(self._end("no turns left", action), marks=marks)
        return StepResult(observation=results, marks=marks)

    def close(self) -> None:
        """Call the user's ``close``, if there is one."""
        end = getattr(self._user, "close", None)
        if end is not None:
            self._suite.finish(end())

    def _result(self, call: Call) -> ChatMessage:
        outcome = answer(call, self._tools)
        self._suite.counts.add(call, outcome.failed)
        # Nine letters and digits, because Mistral's template takes no other ids.
        call_id = f"call{self._calls:05d}"
        message: ChatMessage = {"role": "tool", "content": outcome.text, "tool_call_id": call_id}
        if call.name:
            message["name"] = call.name
        self._calls += 1
        self._failed += outcome.failed
        return message

    def _end(self, why: str, action: str) -> StepResult:
        assert self._begun is not None, "step before reset"
        row, prompt = self._begun
        rewards, correct = self._suite.score(self._user, final_text(action), row, prompt)
        info = {
            "row": row.place,
            "end": why,
            "turns": self._turns,
            "calls": self._calls,
            "failed_calls": self._failed,
        }
        return StepResult(rewards=rewards, done=True, correct=correct, info=info, target=target_of(row))


def taken(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that a function takes by name: all of them if it has ``**kwargs``.

    Example:
        >>> taken(lambda answer: 0, {"prompt": "1 + 1", "answer": "2"})
        {'answer': '2'}
    """
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}
