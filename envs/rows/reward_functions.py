"""Calls the user's reward functions: `(answer, row)`, or TRL's batch form `(completions, **columns)`.

Functions that must not run in a thread of the actor run in processes of their own.
"""

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from envs.errors import EnvError, ServiceFailed
from envs.programs import CODE, CodeReward, load_code_reward
from envs.rows.judge import Judge, load_judge
from envs.rows.prompts import RawPrompt
from envs.rows.reading import DataRow
from envs.user_code import in_one_line, load_callable, nearest, shown
from protocol.processes import die_with_parent

if TYPE_CHECKING:
    from pebble import ProcessPool


FORMS = "(answer, row), or TRL's (completions, **columns)"
VERL = frozenset({"solution_str", "ground_truth"})
"""Arguments that a function of veRL's form has."""
TEXTS = (
    "the prompts of this data are texts, so completions are texts, too; a function that reads messages needs prompts "
    "that are lists of messages"
)
BATCH_ARGUMENTS = frozenset({"completions", "prompts", "environments", "completion_ids", "completions_ids"})
"""Arguments that only TRL's batch form has. A function that takes one of them may leave the others out."""
NO_COLUMNS = frozenset(
    {"prompt", "prompts", "completion", "completions", "completion_ids", "completions_ids"}
)
"""Columns that TRL does not pass on to reward functions, or that its own arguments displace."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward function of the user, and how it is called."""

    name: str
    """Name of the reward."""
    place: str
    """File, line and name of the function, for errors."""
    function: Callable[..., Any]
    batch: bool
    """True if it takes TRL's batch form; a batch has one completion."""
    takes: frozenset[str] | None
    """Names of the arguments that it takes; None: any."""
    columns: tuple[str, ...] = ()
    """Columns of the data set."""
    needs: tuple[str, ...] = ()
    """Names of the arguments without a default."""

    @property
    def asynchronous(self) -> bool:
        """Whether calling it returns a coroutine."""
        call = getattr(self.function, "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    @property
    def timeout_s(self) -> float | None:
        """Longest time of a call that the function itself keeps; None: it keeps none."""
        return self.function.timeout_s if isinstance(self.function, Judge | CodeReward) else None

    @property
    def only_if(self) -> str:
        """Name of the reward that must be above 0 before this one is asked for; "" if there is none."""
        return self.function.only_if if isinstance(self.function, Judge) else ""

    def call(
        self, answer: str, row: DataRow, prompt: RawPrompt, shared: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function and return what it returns; a coroutine if it is asynchronous.

        Args:
            shared: further columns, whose values are handed over as they are.
        """
        # A function may change what it is given, which the next function must not see.
        row, prompt = replace(row, values={**deepcopy(row.values), **(shared or {})}), deepcopy(prompt)
        arguments = self._batch(answer, row, prompt) if self.batch else {"answer": answer, "row": row.values}
        try:
            return self.function(
                **{
                    name: value
                    for name, value in arguments.items()
                    if self.takes is None or name in self.takes
                }
            )
        except TypeError as error:
            if self.batch and isinstance(prompt, str) and "string indices" in str(error):
                error.args = (f"{error}; {TEXTS}",)
            raise

    def _batch(self, answer: str, row: DataRow, prompt: RawPrompt) -> dict[str, Any]:
        completion = answer if isinstance(prompt, str) else [{"role": "assistant", "content": answer}]
        columns = {name: [row.values.get(name)] for name in self.columns if name not in NO_COLUMNS}
        return {**columns, "prompts": [prompt], "completions": [completion]}

    def value(self, result: Any) -> float | None:
        """Return the reward in what the function returned; None if the function does not apply to the row.

        Raises:
            EnvError: the result is no finite number, or no list of one for the batch form.
        """
        if self.batch:
            result = self._only(result)
        # veRL's functions may return a table with the score, and some return the score with what it was made of.
        if isinstance(result, Mapping) and "score" in result:
            result = result["score"]
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            result = result[0]
        if result is None:
            return None
        try:
            # A text such as "1" is a mistake, although it can be converted.
            number = math.nan if isinstance(result, str) else float(result)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise EnvError(f"{self.place} returned {result!r:.80}; a reward is a finite number or None")
        return number

    def _only(self, results: Any) -> Any:
        try:
            values = [] if isinstance(results, str | Mapping) else list(results)
        except TypeError:
            values = []
        if len(values) != 1:
            raise EnvError(
                f"{self.place} returned {results!r:.80}; for one completion it has to return a list of one reward"
            )
        return values[0]


def load_reward_functions(
    reward: Any, columns: Sequence[str], data: str, loaded: dict[str, ModuleType] | None = None
) -> list[RewardFunction]:
    """Return the reward functions that the run file names.

    Args:
        reward: ``file.py:function`` or ``module:function``, or a table of these by the name of the reward. A table
            in place of a function is a judge, see `envs.rows.judge`.
        columns: columns of the data set.
        data: name of the data set, for errors.
        loaded: files that are loaded already, by path, so that none runs twice.

    Raises:
        EnvError: there is no such function, or it takes arguments that nobody passes.
    """
    table = _by_name(reward)
    if not isinstance(table, dict) or not table or not all(isinstance(v, str | dict) for v in table.values()):
        raise EnvError(
            f'params.reward = {reward!r}: name a function as "rewards.py:exact", or several in a table '
            '[env.params.reward], one line each: exact = "rewards.py:exact"; or "code" for programs that are tested'
        )
    loaded = {} if loaded is None else loaded
    functions = [
        _own(name, value, tuple(columns), data)
        if isinstance(value, dict)
        else _loaded(name, value, tuple(columns), data, loaded)
        for name, value in table.items()
    ]
    check_conditions(functions)
    return functions


def check_conditions(functions: Sequence[RewardFunction]) -> None:
    """Check that the condition of each judge is a reward that is known before the judge is asked.

    Raises:
        EnvError: there is no such reward, or it has a condition itself.
    """
    free = [function.name for function in functions if not function.only_if]
    for function in functions:
        if function.only_if and function.only_if not in free:
            raise EnvError(
                f"params.reward.{function.name}.only_if = {function.only_if!r}: no reward without only_if has this name"
                f"{nearest(function.only_if, free)} (rewards: {', '.join(free) or 'none'})"
            )


def by_condition(functions: Sequence[RewardFunction]) -> list[RewardFunction]:
    """Return functions in an order in which the condition of each comes before it."""
    return sorted(functions, key=lambda function: bool(function.only_if))


def plain_names(reward: Any) -> dict[str, str]:
    """Return where the functions of `params.reward` are, by the name of the reward. Judges are left out.

    Example:
        >>> plain_names("rewards.py:exact")
        {'exact': 'rewards.py:exact'}
    """
    table = _by_name(reward)
    return {name: value for name, value in table.items() if isinstance(value, str)}


def _own(name: str, table: dict[str, Any], columns: tuple[str, ...], data: str) -> RewardFunction:
    """Return the judge of a table, or the reward that runs programs."""
    function: Callable[..., Any]
    if CODE in table:
        function, place = load_code_reward(name, table, columns, data), f"params.reward.{name}"
    else:
        function, place = load_judge(name, table, columns, data)
    return RewardFunction(name, place, function, False, frozenset({"answer", "row"}), columns)


def _by_name(reward: Any) -> Any:
    """Return the rewards as a table: a function alone has its own name, and ``code`` is a table of its own."""
    named = {reward.rpartition(":")[2]: reward} if isinstance(reward, str) else reward
    if not isinstance(named, dict):
        return named
    return {name: {CODE: "tests"} if value == CODE else value for name, value in named.items()}


def check_rows(functions: Sequence[RewardFunction], rows: Iterable[DataRow]) -> None:
    """Check that each row has tests that can be read, if a reward runs programs.

    Raises:
        EnvError: a row has none; the text names file and line.
    """
    readers = [function.function for function in functions if isinstance(function.function, CodeReward)]
    for row in rows if readers else ():
        for reader in readers:
            try:
                reader.cases(row.values)
            except EnvError as error:
                raise EnvError(f"{row.place}: {error}") from None


def program_gauges(functions: Sequence[RewardFunction]) -> dict[str, float]:
    """Return the counters of the workers that run programs; nothing if there are none."""
    found = dict[str, float]()
    for function in functions:
        if isinstance(function.function, CodeReward):
            found |= function.function.gauges()
    return found


def answer_found(result: Any) -> str | None:
    """Return the answer that a reward function says it has found in the model's text; None if it says nothing.

    Example:
        >>> answer_found({"score": 1.0, "answer": 42}), answer_found((0.0, {"pred": "7"})), answer_found(1.0)
        ('42', '7', None)
    """
    if isinstance(result, tuple) and len(result) == 2:
        result = result[1]
    if not isinstance(result, Mapping):
        return None
    # veRL's functions call it "pred".
    answer = result.get("answer", result.get("pred"))
    return None if answer is None else str(answer)


def remark_of(result: Any) -> str:
    """Return what a reward function says of its result, for people; "" if it says nothing."""
    return str(result.get("why", "")) if isinstance(result, Mapping) else ""


def _loaded(
    name: str, text: str, columns: tuple[str, ...], data: str, loaded: dict[str, ModuleType]
) -> RewardFunction:
    if ":" not in text:
        raise EnvError(
            f"params.reward = {text!r}: a function is named file.py:function or module:function, such as {text}:reward"
        )
    function = _by_answer_and_row(load_callable(text, "reward", loaded))
    place = _place(function, text)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise EnvError(
            f"{place}: its arguments cannot be read; write a function that takes {FORMS}"
        ) from None
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = frozenset(p.name for p in named)
    needed = [p.name for p in named if p.default is p.empty]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    batch = bool(names & BATCH_ARGUMENTS)
    if positional or not (batch or "answer" in names):
        raise EnvError(f"{place}{signature}: a reward function takes {FORMS}, by these names")
    anything = batch and any(p.kind is p.VAR_KEYWORD for p in parameters)
    found = RewardFunction(name, place, function, batch, None if anything else names, columns, tuple(needed))
    check_columns([found], columns, data)
    return found


def _by_answer_and_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in veRL's form as one of answer and row.

    That form is ``(data_source, solution_str, ground_truth, extra_info)``. Any other function is returned as it is. The
    columns are veRL's: the ground truth may stand in `reward_model`.
    """
    try:
        names = inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):
        return function
    if not names >= VERL:
        return function

    def score(answer: str, row: Mapping[str, Any]) -> Any:
        model = row.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else None
        given = {
            "data_source": row.get("data_source"),
            "solution_str": answer,
            "ground_truth": row.get("ground_truth", truth),
            "extra_info": row.get("extra_info"),
        }
        if given["ground_truth"] is None:
            raise EnvError("the row has no ground_truth, neither as a column nor in reward_model")
        return function(**{name: value for name, value in given.items() if name in names})

    own = inspect.signature(score)
    functools.update_wrapper(score, function)
    score.__signature__ = own  # type: ignore[attr-defined]
    return score


async def close_judges(functions: Sequence[RewardFunction]) -> None:
    """Close the connections of all judges among the functions."""
    for function in functions:
        if isinstance(function.function, Judge):
            await function.function.close()


def check_columns(functions: Sequence[RewardFunction], columns: Sequence[str], data: str) -> None:
    """Check that a data set has every column that the functions need.

    Args:
        functions: reward functions.
        columns: columns of the data set.
        data: name of the data set, for errors.

    Raises:
        EnvError: a function needs an argument that nobody passes.
    """
    for function in functions:
        passed = {"prompts", "completions", *(set(columns) - NO_COLUMNS)}
        for argument in function.needs:
            if argument not in (passed if function.batch else ("answer", "row")):
                why = _why_missing(argument, function.batch, columns, data)
                raise EnvError(f"{function.place}: it needs {argument!r}, {why}")


def _why_missing(argument: str, batch: bool, columns: Sequence[str], data: str) -> str:
    if not batch:
        return "but a function of this form is given answer and row only; read columns from row"
    if argument == "environments":
        return 'but only env.name = "tools" has objects to give'
    if argument in ("completion_ids", "completions_ids"):  # the second is TRL's name of before
        return "but an environment knows the texts only; encode the completion in the function"
    if argument in ("trainer_state", "log_extra", "log_metric"):
        return "which is TRL's trainer's; give it a default, such as None"
    return f"but {data} has no such column{nearest(argument, list(columns))} (columns: {', '.join(columns)})"


def _place(function: Callable[..., Any], text: str) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = text.rpartition(":")[2]
    return f"{shown(code.co_filename)}:{code.co_firstlineno}: {name}" if code is not None else text


log = logging.getLogger(__name__)

LEFT = 70
"""Status of a process whose function ended it with the status 0."""
STOP_S = 5.0
"""Longest wait for the processes to end."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""Functions of this process, by the name of the reward."""


class RewardProcesses:
    """Processes that call reward functions. They begin with the first call.

    Args:
        count: number of processes, hence of calls at the same time.
        named: where each function is, ``file.py:function`` or ``module:function``, by the name of the reward.
    """

    def __init__(self, count: int, named: Mapping[str, str]) -> None:
        self._count, self._named = count, dict(named)
        self._pool: ProcessPool | None = None

    def move(self, function: RewardFunction) -> RewardFunction:
        """Return the function as one that runs in these processes; an asynchronous one unchanged."""
        if function.asynchronous or function.name not in self._named:
            return function
        return replace(function, function=_Elsewhere(self, function))

    async def call(self, function: RewardFunction, arguments: dict[str, Any]) -> Any:
        """Call a function and return what it returns. If the caller gives up, its process is ended.

        Raises:
            EnvError: the function raised an error, or its process ended; the text names file and line.
            ServiceFailed: the function raised it.
        """
        try:
            waiting = self._started().schedule(_call_in_process, args=(function.name, arguments))
            result, failed, text = await asyncio.wrap_future(waiting)
        except asyncio.CancelledError:
            log.warning("%s: the process that ran it is ended, because it took too long", function.place)
            raise
        except Exception as error:
            # The process has died, or an argument or the result cannot be sent to another process.
            raise EnvError(f"{function.place}: {type(error).__name__}: {error}") from None
        if failed == ServiceFailed.__name__:
            raise ServiceFailed(text)
        if failed:
            raise EnvError(failed) from RemoteTraceback(text)
        return result

    async def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self._pool.join, STOP_S), STOP_S)

    def _started(self) -> "ProcessPool":
        old = self._pool
        # A pool that has lost an idle process takes no further call.
        if old is not None and not old.active:
            self._pool = None
            threading.Thread(target=old.join, name="ends reward processes", daemon=True).start()
        if self._pool is None:
            from pebble import ProcessPool

            # A fork would copy the locks of the actor's threads.
            self._pool = ProcessPool(
                max_workers=self._count,
                initializer=_begin_process,
                initargs=(self._named,),
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool


class RemoteTraceback(Exception):
    """The traceback of an error in a reward process, as text."""


class _Elsewhere:
    """Stands for a function that runs in another process."""

    def __init__(self, processes: RewardProcesses, function: RewardFunction) -> None:
        self._processes, self._function = processes, function

    async def __call__(self, **arguments: Any) -> Any:
        return await self._processes.call(self._function, arguments)


def _begin_process(named: Mapping[str, str]) -> None:
    """Load the functions in a new process."""
    die_with_parent()
    # A process that ends with the status 0 looks as if it was asked to, and its call would wait for its deadline.
    os._exit = _leave
    loaded: dict[str, ModuleType] = {}
    for name, text in named.items():
        _FUNCTIONS[name] = _by_answer_and_row(load_callable(text, "reward", loaded))


def _leave(status: int, end: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """End the process with a status other than 0."""
    end(status or LEFT)


def _call_in_process(name: str, arguments: dict[str, Any]) -> tuple[Any, str, str]:
    """Return a function's result, or the error that it raised: in one line, and with its traceback.

    An exception would not survive the way back if its class takes other arguments than a text.
    """
    try:
        return _FUNCTIONS[name](**arguments), "", ""
    except ServiceFailed as error:
        return None, ServiceFailed.__name__, str(error)
    except BaseException as error:
        return None, in_one_line(error), traceback.format_exc()
