"""The suite of rows: a data set and reward functions make a training job. An episode is one prompt and one answer."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from envs.base import ChatMessage, Env, Split, StepResult, SuiteFacts
from envs.errors import EnvError
from envs.reasoning_gym_suite import task_of
from envs.rows.prompts import PromptMaker, RawPrompt, check_hint, hints_of, solution_of, target_of
from envs.rows.reading import DataRow, columns_of, divided, index_of, key_of, of_task, read_rows, shown_name
from envs.rows.reward_functions import (
    RewardFunction,
    RewardProcesses,
    answer_found,
    by_condition,
    check_columns,
    check_rows,
    close_judges,
    load_reward_functions,
    plain_names,
    program_gauges,
    remark_of,
)
from envs.scoring.programs import GAUGES as PROGRAMS
from envs.user_code import absolute_beside_run_file, code_beside_run_file, code_file
from protocol.gauges import Gauge, table


class RowEpisode:
    """One row and the answer to its prompt.

    Args:
        begin: returns the row of a task, its prompt, and the first messages.
        score: returns the result of an answer.
    """

    def __init__(
        self,
        begin: Callable[[int, Split], tuple[DataRow, RawPrompt, list[ChatMessage]]],
        score: Callable[[str, DataRow, RawPrompt], StepResult | Awaitable[StepResult]],
    ) -> None:
        self._begin, self._score = begin, score
        self._begun: tuple[DataRow, RawPrompt] | None = None

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        row, prompt, messages = self._begin(*task_of(data))
        self._begun = row, prompt
        return messages

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Score an answer. A plain function, so that the actor runs it in a thread, and functions may block."""
        assert self._begun is not None, "step before reset"
        return self._score(action, *self._begun)

    async def close(self) -> None:
        return None


GAUGES = {
    **table([Gauge("epoch", "epochs", "passes over the training rows that tasks have begun, of `rows`")]),
    **PROGRAMS,
}
"""Gauges of the suite."""
FILES = ("train", "heldout")
"""Parameters that name a data set."""


class RowsSuite:
    """Suite with one task for each row of a data set. The answer is one assistant turn.

    Args:
        train: file of the rows (.jsonl, .jsonl.gz, .json, .csv, .parquet), or a data set of the hub.
        reward: reward function as ``file.py:function``, or "code", see `envs.programs`; or a table of these and of
            judges by the name of the reward.
        prompt: column that holds the prompt, a text or messages; or a template such as ``"{a} + {b} ="``.
        system: text of a system message. Empty: none.
        heldout: file of the held-out rows, or the share of the rows of ``train`` that is held out, at least 0 and
            below 1. The share is chosen by a hash of the prompt.
        correct: reward that says whether an answer is correct. Empty: the only one, if there is one only.
        solved_at: smallest value of this reward with which an answer counts as correct.
        seed: seed of the order of the rows in each epoch.
        hint: column that holds a solution, or a list of hints from the weakest to the strongest, for methods that give
            hints. Empty: none.
        processes: processes in which plain reward functions run, of each actor; 0: they run in its threads.

    Raises:
        EnvError: a file, a row, a function or a setting is wrong; the text names file and line.
    """

    def __init__(
        self,
        train: str,
        reward: str | dict[str, Any],
        prompt: str = "prompt",
        system: str = "",
        heldout: str | float = 0.1,
        correct: str = "",
        solved_at: float = 1.0,
        seed: int = 0,
        processes: int = 0,
        hint: str = "",
    ) -> None:
        _check_texts(train=train, prompt=prompt, system=system, correct=correct, hint=hint)
        _check_numbers(solved_at, seed, processes)
        rows = read_rows(train, "params.train")
        columns = columns_of(rows)
        self.columns: dict[Split, list[str]] = {"train": columns}
        """Columns of the data set of each split; "heldout" is there if it is a data set of its own."""
        self._maker = PromptMaker(prompt, system, columns, shown_name(train))
        self._seed, self._solved_at, self._remarks = seed, float(solved_at), list[str]()
        self._hint = hint
        check_hint(hint, columns, rows, shown_name(train))
        self._rows: dict[Split, list[DataRow]] = self._split(rows, heldout, prompt, system)
        if not self._rows["train"]:
            raise EnvError(
                f"params.heldout = {heldout!r} leaves none of the {len(rows)} rows of {shown_name(train)} to train on"
            )
        self._functions = load_reward_functions(reward, columns, shown_name(train))
        self._processes = RewardProcesses(processes, plain_names(reward)) if processes else None
        if self._processes is not None:
            self._functions = [self._processes.move(function) for function in self._functions]
        self._correct = _deciding_reward(correct, [function.name for function in self._functions])
        if isinstance(heldout, str):
            check_columns(self._functions, self.columns["heldout"], shown_name(heldout))
        check_rows(self._functions, self.rows())
        self._remarks += _unequal_answers([row for own in self._rows.values() for row in own], self._maker)
        self._newest = -1

    @staticmethod
    def find_files(params: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return the params with the paths by which every role finds the files; see `envs.registry.beside`."""
        found = dict(params)
        for name in FILES:
            if isinstance(found.get(name), str):
                found[name] = absolute_beside_run_file(found[name], folder)
        reward = found.get("reward")
        if isinstance(reward, str):
            found["reward"] = code_beside_run_file(reward, folder, absolute_beside_run_file)
        elif isinstance(reward, dict):
            found["reward"] = {name: _beside(value, folder) for name, value in reward.items()}
        return found

    @staticmethod
    def files(params: dict[str, Any]) -> list[str]:
        """Return the files that make the tasks and the rewards: those of the rows, of functions and of judges."""
        reward = params.get("reward")
        kinds = list(reward.values()) if isinstance(reward, dict) else [reward]
        named = [*(params.get(name) for name in FILES)]
        named += [kind.get("prompt") if isinstance(kind, dict) else code_file(kind) for kind in kinds]
        return [text for text in named if isinstance(text, str) and text]

    @staticmethod
    def fingerprint(params: dict[str, Any]) -> str:
        """Return a hash of the training rows' file, by which a tiny model made from it is kept; "" without one."""
        path = Path(str(params.get("train")))
        return blake2b(path.read_bytes(), digest_size=8).hexdigest() if path.is_file() else ""

    def _split(
        self, rows: list[DataRow], heldout: str | float, prompt: str, system: str
    ) -> dict[Split, list[DataRow]]:
        """Return the rows of both splits. Every prompt is made once, so that a bad row is found at the start."""
        if isinstance(heldout, str):
            others = read_rows(heldout, "params.heldout")
            columns = self.columns["heldout"] = columns_of(others)
            maker = PromptMaker(prompt, system, columns, shown_name(heldout))
            known = {key_of(maker.raw(row)) for row in others}
            train = [row for row in rows if key_of(self._maker.raw(row)) not in known]
            if left := len(rows) - len(train):
                where = shown_name(heldout)
                self._remarks.append(
                    f"{left} of {len(rows)} training rows have a prompt of {where}, so they are not trained"
                )
            return {"train": train, "heldout": others}
        own, held = divided(rows, heldout, self._maker.raw, "name a file, or a share of the rows")
        return {"train": own, "heldout": held}

    def episode(self) -> Env:
        return cast(Env, RowEpisode(self.begin, self.score))

    def rows(self) -> list[DataRow]:
        """Return all rows of both splits."""
        return [row for own in self._rows.values() for row in own]

    def row(self, index: int, split: Split) -> DataRow:
        """Return the row of a task.

        Raises:
            EnvError: there are fewer held-out rows.
        """
        return of_task(self._rows, index, split, self._seed)

    def begin(self, index: int, split: Split) -> tuple[DataRow, RawPrompt, list[ChatMessage]]:
        """Return the row of a task that begins, its prompt, and the first messages."""
        row = self.row(index, split)
        if split == "train":
            self._newest = max(self._newest, index)
        # Code of the user may change what it is given, and the row comes again in other episodes.
        row = replace(row, values=deepcopy(row.values))
        return row, self._maker.raw(row), deepcopy(self._maker.messages(row))

    def score(self, answer: str, row: DataRow, prompt: RawPrompt) -> StepResult | Awaitable[StepResult]:
        """Return the result of an answer; an awaitable if a function is asynchronous. Blocks otherwise."""
        # Functions that block run first, in the thread of this call.
        done = {f.name: f.call(answer, row, prompt) for f in self._functions if not f.asynchronous}
        waiting = [f for f in self._functions if f.asynchronous]
        waiting += [f for f in self._functions if inspect.isawaitable(done.get(f.name))]
        if waiting:
            return self._awaited(answer, row, prompt, waiting, done)
        return self._result(row, done)

    async def _awaited(
        self,
        answer: str,
        row: DataRow,
        prompt: RawPrompt,
        waiting: list[RewardFunction],
        done: dict[str, Any],
    ) -> StepResult:
        known = {function.name: function for function in self._functions}
        for function in by_condition(waiting):
            if (name := function.only_if) and not (known[name].value(done[name]) or 0.0) > 0:
                done[function.name] = None
                continue
            result = done.get(function.name)
            done[function.name] = await (function.call(answer, row, prompt) if result is None else result)
        return self._result(row, done)

    def _result(self, row: DataRow, results: Mapping[str, Any]) -> StepResult:
        rewards = {}
        for function in self._functions:
            if (value := function.value(results[function.name])) is not None:
                rewards[function.name] = value
        if not rewards:
            places = ", ".join(function.place for function in self._functions)
            raise EnvError(f"{row.place}: every reward function returned None ({places}); one has to apply")
        decides = rewards.get(self._correct)
        remarks = {name: remark for name, result in results.items() if (remark := remark_of(result))}
        return StepResult(
            rewards=rewards,
            done=True,
            correct=None if decides is None else decides >= self._solved_at,
            info={"row": row.place, **({"rewards": remarks} if remarks else {})},
            hints=hints_of(row, self._hint) if self._hint else (),
            answer=next(
                (text for result in results.values() if (text := answer_found(result)) is not None), None
            ),
            target=target_of(row),
        )

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a row's prompt and the solution in its column `answer` or `completion`.

        Raises:
            LookupError: the row has neither.
        """
        row = self.row(index, split)
        return [*self._maker.messages(row), {"role": "assistant", "content": solution_of(row)}]

    def facts(self) -> SuiteFacts:
        """Return the number of held-out rows, the names of the rewards, the longest prompts, and remarks."""
        names = tuple(function.name for function in self._functions)
        longest = tuple(self._longest(split) for split, rows in self._rows.items() if rows)
        return SuiteFacts(
            len(self._rows["heldout"]),
            names,
            longest,
            tuple(self._remarks),
            mark_names=(),
            hints=bool(self._hint),
            train_tasks=len(self._rows["train"]),
        )

    def _longest(self, split: Split) -> tuple[Split, int, str]:
        """Return the split, index and place of the task with the longest prompt in characters."""
        rows = self._rows[split]
        lengths = [sum(len(message["content"]) for message in self._maker.messages(row)) for row in rows]
        at = lengths.index(max(lengths))
        return split, index_of(at, len(rows), self._seed) if split == "train" else at, rows[at].place

    def gauges(self) -> dict[str, float]:
        """Return how often tasks have gone through the training rows, for the actor's heartbeat."""
        epoch = {"epoch": (self._newest + 1) / len(self._rows["train"])} if self._newest >= 0 else {}
        return {**epoch, **program_gauges(self._functions)}

    async def close(self) -> None:
        await close_judges(self._functions)
        if self._processes is not None:
            await self._processes.close()


def _unequal_answers(rows: Sequence[DataRow], maker: PromptMaker) -> list[str]:
    """Return a remark if rows have equal prompts and different solutions: one rewards what the other does not."""
    first: dict[str, tuple[str, str]] = {}
    unequal: list[tuple[str, str]] = []
    for row in rows:
        try:
            solution = solution_of(row)
            place, other = first.setdefault(key_of(maker.raw(row)), (row.place, solution))
        except (LookupError, EnvError):
            continue
        if other != solution:
            unequal.append((place, row.place))
    if not unequal:
        return []
    one, two = unequal[0]
    return [
        f"{len(unequal)} rows have the prompt of another row and another answer, the first at {one} and {two}"
    ]


def _beside(reward: Any, folder: Path) -> Any:
    """Return the reward function or the judge with the path by which every role finds its file."""
    if isinstance(reward, str):
        return code_beside_run_file(reward, folder, absolute_beside_run_file)
    if isinstance(reward, dict) and isinstance(reward.get("prompt"), str):
        return {**reward, "prompt": absolute_beside_run_file(reward["prompt"], folder)}
    return reward


def _check_texts(**texts: Any) -> None:
    for name, value in texts.items():
        if not isinstance(value, str):
            raise EnvError(f"params.{name} = {value!r}: write a text in quotation marks")


def _check_numbers(solved_at: Any, seed: Any, processes: Any) -> None:
    numbers = (("solved_at", solved_at, int | float), ("seed", seed, int), ("processes", processes, int))
    for name, number, kinds in numbers:
        if isinstance(number, bool) or not isinstance(number, kinds):
            raise EnvError(f"params.{name} = {number!r}: write a number")
    if processes < 0:
        raise EnvError(f"params.processes = {processes}: write 0 for threads, or a number of processes")


def _deciding_reward(correct: str, names: Sequence[str]) -> str:
    """Return the name of the reward that says whether an answer is correct; "" if none does."""
    if correct and correct not in names:
        raise EnvError(
            f"params.correct = {correct!r}: no reward has this name; name one of {', '.join(names)}"
        )
    return correct or (names[0] if len(names) == 1 else "")
