"""What the table filters, sorts and sums up, in arrays with an element for each trajectory, which grow with the index.

Python objects of 100,000 trajectories take a large part of a second to look through; arrays take milliseconds.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.run_file.sections import RunConfig
from launch.view.journal_index import JournalIndex, Row

NONE = int(np.iinfo(np.int32).min)
"""A whole number that is missing."""
Places = NDArray[np.intp]
Mask = NDArray[np.bool_]
_EVALUATION = re.compile(r"(\d+)eval-(.*)-(\d+)")
_WHEN = re.compile(r" ?\b(before|after|step \d+)( \d+)?$")
"""When an evaluation was: the end of its tag, behind the name of the set."""
_WHOLE = (
    "step", "length", "tokens", "lag", "turns", "version_low", "version_high", "correct", "env", "purpose", "status",
    "outcome", "reason", "group", "evaluation", "number", "held_out",
)  # fmt: skip


def evaluation_of(row: Row) -> tuple[str, int] | None:
    """Return tag and number of a held-out task; None for a training task.

    Example:
        >>> evaluation_of(Row("1eval-hard step 20-5.0", "1eval-hard step 20-5", "", 1, "e", "eval", "", 0.0))
        ('hard step 20', 5)
    """
    match = _EVALUATION.fullmatch(row.task) if row.purpose == "eval" else None
    return (match[2], int(match[3])) if match else None


def held_out_task(row: Row) -> tuple[str, int] | None:
    """Return set and number of a held-out task, which are the same in each evaluation; None for a training task.

    Example:
        >>> held_out_task(Row("1eval-hard step 20 20-5.0", "1eval-hard step 20 20-5", "", 1, "e", "eval", "", 0.0))
        ('hard', 5)
        >>> held_out_task(Row("1eval-after 4-7.0", "1eval-after 4-7", "", 1, "e", "eval", "", 0.0))
        ('', 7)
    """
    found = evaluation_of(row)
    return None if found is None else (_WHEN.sub("", found[0]), found[1])


def reward_of(row: Row, config: RunConfig | None) -> float | None:
    """Return the weighted sum of a trajectory's rewards; None if it has none, or failed. See `rewards_by`."""
    return rewards_by(config)(row)


def rewards_by(config: RunConfig | None) -> Callable[[Row], float | None]:
    """Return the function from a trajectory to its weighted sum of rewards.

    The weights are those of `[learner.reward.weights]` after all stages. What else the section does is not applied, so
    the sum can differ from the return that the learner trained on; samples have that.
    """
    weights = weights_of(config)

    def reward(row: Row) -> float | None:
        rewards = row.rewards
        if not rewards or row.status == "failed":
            return None
        if not weights:
            return sum(rewards.values())
        return sum(weights.get(name, 1.0) * value for name, value in rewards.items())

    return reward


def weights_of(config: RunConfig | None) -> dict[str, float]:
    """Return the weights of rewards by name; one that is not there has the weight 1."""
    return dict(config.learner.reward.weights_in_force) if config is not None else {}


def known_step(row: Row) -> int | None:
    """Return the learner step that took a trajectory; None while none did."""
    return row.step if row.step >= 0 else None


def is_uniform(members: Sequence[Row]) -> bool:
    """Return whether a group has ended, and all its members have the same rewards, so that it teaches nothing.

    Example:
        >>> def row(reward):
        ...     rewards = {"r": reward}
        ...     return Row("t", "t", "g", 2, "e", "train", "", 1.0, status="finished", rewards=rewards)
        >>> is_uniform([row(1.0), row(1.0)]), is_uniform([row(1.0), row(0.0)]), is_uniform([row(1.0)])
        (True, False, False)
    """
    ended = [row for row in members if row.status not in ("unfinished", "failed")]
    return (
        len(ended) > 1
        and len(ended) >= members[0].group_size
        and all(r.rewards == ended[0].rewards for r in ended)
    )


class Codes:
    """Numbers for values, in the order in which they came.

    Example:
        >>> codes = Codes()
        >>> codes.of("a"), codes.of("b"), codes.of("a"), codes.known("c"), codes.values
        (0, 1, 0, -1, ['a', 'b'])
    """

    def __init__(self) -> None:
        self._codes: dict[Any, int] = {}
        self.values: list[Any] = []

    def of(self, value: Any) -> int:
        """Return the number of a value; a new one gets the next."""
        code = self._codes.get(value)
        if code is None:
            code = self._codes[value] = len(self.values)
            self.values.append(value)
        return code

    def known(self, value: Any) -> int:
        """Return the number of a value, or -1."""
        return self._codes.get(value, -1)

    def where(self, test: Callable[[Any], bool]) -> Mask:
        """Return for each number whether its value passes a test."""
        return np.array([test(value) for value in self.values], np.bool_)


class RowColumns:
    """The rows of an index as arrays. Whoever uses them holds the index's lock, and has called `refresh`.

    Attributes:
        reward: weighted sums of rewards; NaN: none.
        arrived: wall clock of the newest segment, in seconds since 1970; NaN if the journal does not say.
        uniform: for each number of a group, whether it teaches nothing, see `is_uniform`.
        changes: how many rows were written so far.
    """

    def __init__(self, index: JournalIndex) -> None:
        self._index = index
        self._whole = {name: np.empty(0, np.int32) for name in _WHOLE}
        self._floats = {name: np.empty(0, np.float64) for name in ("reward", "arrived")}
        self._uniform = np.empty(0, np.bool_)
        self._weights: dict[str, float] | None = None
        self.codes = {
            name: Codes()
            for name in ("env", "purpose", "status", "outcome", "reason", "group", "evaluation", "held_out")
        }
        self.reward_names: set[str] = set()
        self.rows, self.changes = 0, 0
        self._ranks: tuple[int, NDArray[np.int32]] = (-1, np.empty(0, np.int32))

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a column. It is not to be changed."""
        return (self._whole if name in self._whole else self._floats)[name][: self.rows]

    @property
    def uniform(self) -> Mask:
        return self._uniform[: len(self.codes["group"].values)]

    def refresh(self, config: RunConfig | None) -> None:
        """Take the rows that have changed since the last call."""
        index, weights = self._index, weights_of(config)
        if weights != self._weights:
            # All sums of rewards change with the weights.
            self._weights = weights
            index.touched.update(range(len(index.rows)))
        if not index.touched:
            return
        self._grow(len(index.rows))
        reward, groups = rewards_by(config), set[str]()
        for place in index.touched:
            row = index.rows[place]
            self._write(place, row, reward(row))
            groups.add(row.group)
        self.changes += len(index.touched)
        index.touched.clear()
        for group in groups:
            self._uniform[self.codes["group"].of(group)] = is_uniform(index.groups.get(group, []))

    def _grow(self, rows: int) -> None:
        self.rows = rows
        room = len(self._uniform)
        if rows <= room:
            return
        more = max(rows, room + room // 4, 1_024) - room
        # There are as many groups as rows at most.
        self._uniform = np.concatenate([self._uniform, np.zeros(more, np.bool_)])
        for columns in (self._whole, self._floats):
            for name, column in columns.items():
                columns[name] = np.concatenate([column, np.empty(more, column.dtype)])

    def _write(self, place: int, row: Row, reward: float | None) -> None:
        codes, lag, versions = self.codes, row.lag, row.versions
        evaluation = evaluation_of(row)
        at = row.pieces[-1].at if row.pieces else None
        low, high = (NONE, NONE) if versions is None else versions
        values = (
            row.step if row.step >= 0 else NONE, row.action_tokens, row.tokens, NONE if lag is None else lag, row.turns,
            low, high, NONE if row.correct is None else int(row.correct),
            codes["env"].of(row.env), codes["purpose"].of(row.purpose), codes["status"].of(row.status),
            codes["outcome"].of(row.outcome), codes["reason"].of(row.failure or row.stop_reason),
            codes["group"].of(row.group),
            NONE if evaluation is None else codes["evaluation"].of(evaluation[0]),
            NONE if evaluation is None else min(evaluation[1], -NONE - 1),
            NONE if evaluation is None else codes["held_out"].of(held_out_task(row)),
        )  # fmt: skip
        for column, value in zip(self._whole.values(), values, strict=True):
            column[place] = value
        self._floats["reward"][place] = math.nan if reward is None else reward
        self._floats["arrived"][place] = math.nan if at is None else at
        self.reward_names.update(row.rewards)

    def named_reward(self, name: str) -> NDArray[np.float64]:
        """Return the rewards of one name, without its weight; NaN: a row has none."""
        rows = self._index.rows
        return np.fromiter((row.rewards.get(name, math.nan) for row in rows), np.float64, len(rows))

    def ranks(self) -> NDArray[np.int32]:
        """Return the place of each row in the order of the names of trajectories."""
        names = [row.trajectory for row in self._index.rows]
        if self._ranks[0] != len(names):
            # A name never changes, so the order holds until there are more.
            ranks = np.empty(len(names), np.int32)
            ranks[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names), dtype=np.int32)
            self._ranks = (len(names), ranks)
        return self._ranks[1]

    def present(self, name: str) -> list[Any]:
        """Return the values of a column of codes that some row has, in the order of their first row."""
        found, first = np.unique(self[name], return_index=True)
        values = self.codes[name].values
        return [values[code] for code in found[np.argsort(first)] if code != NONE]
