"""Several environments in one run: each task belongs to one of them, chosen by its index and the weights."""

import inspect
import re
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from envs.base import (
    ChatMessage,
    Env,
    HasFacts,
    HasGauges,
    HasGiveUp,
    HasTools,
    HasTurnFacts,
    HasTurnLimit,
    Split,
    StepResult,
    Suite,
    SuiteFacts,
    ToolSchema,
    TurnFacts,
    can_refuse,
)
from envs.errors import EnvError
from envs.registry import beside, files_of, fingerprint, make_suite

MAX_CYCLE = 1_000
"""Upper limit of the tasks after which the order of environments repeats."""


def cycle_of(weights: Sequence[float]) -> list[int]:
    """Return an order of environments that repeats, in which each has its share, spread evenly.

    Each place goes to the environment that lacks most of its share so far. One of weight 0 gets none.

    Example:
        >>> cycle_of([1.0, 1.0]), cycle_of([3.0, 1.0]), cycle_of([0.0, 2.0])
        ([0, 1], [0, 0, 1, 0], [1])
    """
    dealt_to = [i for i, weight in enumerate(weights) if weight]
    least = min(weights[i] for i in dealt_to)
    length = next(
        (
            n
            for n in range(len(dealt_to), MAX_CYCLE)
            if all(abs(n * w / sum(weights) - round(n * w / sum(weights))) < 1e-9 for w in weights)
        ),
        min(MAX_CYCLE, round(sum(weights) / least) * 10),
    )
    shares = [weight / sum(weights) for weight in weights]
    counts = [0] * len(weights)
    order = []
    for place in range(1, length + 1):
        chosen = max(dealt_to, key=lambda i: (shares[i] * place - counts[i], -i))
        counts[chosen] += 1
        order.append(chosen)
    return order


def dealt(index: int, cycle: Sequence[int]) -> tuple[int, int]:
    """Return the environment of a task, and the number of tasks that it had before this one.

    Example:
        >>> [dealt(index, [0, 0, 1, 0]) for index in range(6)]
        [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (0, 4)]
    """
    rounds, place = divmod(index, len(cycle))
    part = cycle[place]
    return part, rounds * cycle.count(part) + list(cycle[:place]).count(part)


def tasks_until_one_is_short(counts: Sequence[int | None], cycle: Sequence[int]) -> int | None:
    """Return how many tasks can be dealt until an environment has none left; None if that never happens.

    Example:
        >>> tasks_until_one_is_short([10, 2], [0, 1]), tasks_until_one_is_short([None, None], [0, 1])
        (5, None)
    """
    ends = []
    for part, count in enumerate(counts):
        places = [place for place, owner in enumerate(cycle) if owner == part]
        if count is not None and places:
            rounds, rest = divmod(count, len(places))
            ends.append(rounds * len(cycle) + places[rest])
    return min(ends, default=None)


KEYS = ("name", "label", "weight", "params")
"""Keys of an ``[[env]]`` table."""
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,40}")


def checked_tables(environments: Any) -> list[dict[str, Any]]:
    """Return the tables of ``[[env]]`` with all keys.

    Raises:
        EnvError: a key is unknown or missing, a weight is below 0, all are 0, or two tables have one label.
    """
    if not isinstance(environments, list | tuple) or not environments:
        raise EnvError("params.environments is empty: write one [[env]] table for each environment")
    tables = []
    for number, table in enumerate(environments):
        where = f"[[env]] number {number + 1}"
        if unknown := sorted(set(table) - set(KEYS)):
            raise EnvError(f"{where}: there is no key {unknown[0]!r}; it takes {', '.join(KEYS)}")
        if not isinstance(table.get("name"), str):
            raise EnvError(f"{where} has no name")
        label, weight = table.get("label", table["name"]), table.get("weight", 1.0)
        if not isinstance(label, str) or not _LABEL.fullmatch(label):
            raise EnvError(f"{where}: label {label!r}: write letters, digits, - and _ (at most 40)")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise EnvError(f"{where}: weight = {weight!r}: write a number, 0 or above")
        params = table.get("params", {})
        tables.append({"name": table["name"], "label": label, "weight": float(weight), "params": params})
    twice = [label for label, count in Counter(table["label"] for table in tables).items() if count > 1]
    if not any(table["weight"] for table in tables):
        raise EnvError(
            "every [[env]] has weight = 0: there is nothing to train on; give one a weight above 0"
        )
    if twice:
        raise EnvError(f"two [[env]] tables have the label {twice[0]!r}; give each a label of its own")
    return tables


ENV = "env"
"""Key of a task's data that holds the label of its environment, if its index does not decide."""


@dataclass(frozen=True)
class Part:
    """One environment of several."""

    label: str
    """Prefix of its rewards and gauges."""
    weight: float
    """Its share of the tasks is this number divided by the sum of all weights. 0: only evaluation sets have it."""
    suite: Suite


class SeveralSuite:
    """Suite that deals the tasks of a run to several suites.

    Args:
        environments: tables with `name`, `params`, `weight` (1) and `label` (the name).

    Raises:
        EnvError: a table is wrong, or a suite cannot be made.
    """

    def __init__(self, environments: Sequence[Mapping[str, Any]]) -> None:
        tables = checked_tables(environments)
        self._parts = [_part(table) for table in tables]
        self._cycle = cycle_of([part.weight for part in self._parts])

    @staticmethod
    def find_files(params: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return the params with the paths by which every role finds the files; see `envs.registry.beside`."""
        found = []
        for table in checked_tables(params.get("environments", [])):
            name, own = beside(table["name"], table["params"], folder)
            found.append({**table, "name": name, "params": own})
        return {**params, "environments": found}

    @staticmethod
    def fingerprint(params: dict[str, Any]) -> str:
        """Return a hash of the files of all environments; see `envs.registry.fingerprint`."""
        return "".join(
            fingerprint(table["name"], table["params"]) for table in checked_tables(params["environments"])
        )

    @staticmethod
    def files(params: dict[str, Any]) -> list[str]:
        """Return the files of all environments; see `envs.registry.content_hash`."""
        tables = checked_tables(params["environments"])
        return [file for table in tables for file in files_of(table["name"], table["params"])]

    def episode(self) -> Env:
        return cast(Env, _EpisodeOfOne(self))

    def at(self, index: int) -> tuple[Part, int]:
        """Return the environment of a task, and the task's index in it."""
        part, own = dealt(index, self._cycle)
        return self._parts[part], own

    def labelled(self, label: str) -> Part:
        """Return the environment of a label.

        Raises:
            EnvError: there is none.
        """
        for part in self._parts:
            if part.label == label:
                return part
        raise EnvError(f"there is no [[env]] table {label!r}")

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        part, own = self.at(index)
        return part.suite.demonstration(own, split)

    def facts(self) -> SuiteFacts:
        """Return how many held-out tasks there are before an environment runs out of its own, and other facts."""
        facts = [p.suite.facts() if isinstance(p.suite, HasFacts) else SuiteFacts() for p in self._parts]
        names = [
            tuple(f"{part.label}/{name}" for name in of.reward_names)
            for part, of in zip(self._parts, facts, strict=True)
            if of.reward_names is not None
        ]
        return SuiteFacts(
            heldout_tasks=tasks_until_one_is_short([of.heldout_tasks for of in facts], self._cycle),
            reward_names=tuple(name for own in names for name in own) if len(names) == len(facts) else None,
            mark_names=_common([of.mark_names for of in facts]),
            hints=_all([of.hints for of in facts]),
            own_prompts=any(of.own_prompts for of in facts),
            fixed_ports=tuple(port for of in facts for port in of.fixed_ports),
            remarks=tuple(
                f"{part.label}: {remark}"
                for part, of in zip(self._parts, facts, strict=True)
                for remark in of.remarks
            ),
            heldout_by_env={p.label: of.heldout_tasks for p, of in zip(self._parts, facts, strict=True)},
        )

    def gauges(self) -> dict[str, float]:
        """Return the gauges of all suites, each with the label of its environment."""
        return {
            f"{part.label}/{name}": value
            for part in self._parts
            if isinstance(part.suite, HasGauges)
            for name, value in part.suite.gauges().items()
        }

    async def close(self) -> None:
        """Close all suites, also if one cannot be closed."""
        errors = []
        for part in self._parts:
            try:
                closed: Any = part.suite.close()
                if inspect.isawaitable(closed):
                    await closed
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class _EpisodeOfOne:
    """Episode of the environment that the task belongs to, which `reset` tells.

    The functions are plain ones, which the actor runs in threads, because those of the environment may block.
    """

    def __init__(self, suite: SeveralSuite) -> None:
        self._suite, self._label = suite, ""
        self._env: Env | None = None

    def reset(self, data: dict[str, Any]) -> Any:
        part, own = self._suite.at(int(data["index"]))
        if named := data.get(ENV):
            # A task of an evaluation set that belongs to one environment.
            part, own = self._suite.labelled(named), int(data["index"])
        self._label, self._env = part.label, part.suite.episode()
        return self._env.reset({name: value for name, value in data.items() if name != ENV} | {"index": own})

    def tool_schemas(self) -> Sequence[ToolSchema]:
        return self._env.tool_schemas() if isinstance(self._env, HasTools) else ()

    def turn_limit(self) -> int | None:
        return self._env.turn_limit() if isinstance(self._env, HasTurnLimit) else None

    def turn_facts(self, facts: TurnFacts) -> None:
        if isinstance(self._env, HasTurnFacts):
            self._env.turn_facts(facts)

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        assert self._env is not None, "step before reset"
        return self._result(self._env.step(action))

    @property
    def refuses(self) -> bool:
        """Whether the environment of the task can refuse messages."""
        return self._env is not None and can_refuse(self._env)

    def refuse(self, why: str, too_long: bool) -> StepResult | Awaitable[StepResult]:
        assert self._env is not None, "refuse before reset"
        assert can_refuse(self._env)
        return self._result(self._env.refuse(why, too_long))

    def give_up(self) -> None:
        if isinstance(self._env, HasGiveUp):
            self._env.give_up()

    def _result(self, result: Any) -> StepResult | Awaitable[StepResult]:
        labelled: StepResult | Awaitable[StepResult] = (
            self._awaited(result) if inspect.isawaitable(result) else self._labelled(result)
        )
        return labelled

    async def _awaited(self, result: Awaitable[Any]) -> StepResult:
        labelled: StepResult = self._labelled(await result)
        return labelled

    def _labelled(self, result: Any) -> Any:
        # What is no result is refused by the actor, with its own words.
        if not isinstance(result, StepResult) or not isinstance(result.rewards, dict):
            return result
        return replace(
            result,
            rewards=self._own(result.rewards),
            earlier={number: self._own(rewards) for number, rewards in result.earlier.items()},
        )

    def _own(self, rewards: dict[str, float]) -> dict[str, float]:
        return {f"{self._label}/{name}": value for name, value in rewards.items()}

    def close(self) -> Any:
        return self._env.close() if self._env is not None else None


def _common(names: Sequence[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """Return the names that all have; None if one is not known."""
    known = [set(own) for own in names if own is not None]
    return tuple(sorted(set.intersection(*known))) if known and len(known) == len(names) else None


def _all(known: Sequence[bool | None]) -> bool | None:
    """Return whether all are true; None if that is not known.

    Example:
        >>> _all([True, None]), _all([True, True]), _all([None, False])
        (None, True, False)
    """
    return False if False in known else None if None in known else True


def _part(table: Mapping[str, Any]) -> Part:
    try:
        return Part(table["label"], table["weight"], make_suite(table["name"], table["params"]))
    except EnvError as error:
        raise EnvError(f"[[env]] {table['label']}: {error}") from error
