"""Chooses held-out rows, and the order of the rows in each epoch. Pure, and equal in every process."""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

from envs.base import Split
from envs.errors import EnvError

T = TypeVar("T")

ROUNDS = 8
"""Rounds of the network that permutes rows; four make a permutation that looks random (Luby and Rackoff, 1988)."""


def is_heldout(prompt: Any, share: float) -> bool:
    """Return whether a row is held out, by a hash of its prompt.

    The choice depends on nothing but the prompt and the share, so new rows and another order change nothing.
    Rows with equal prompts are on one side.

    Args:
        prompt: the prompt of the row, a text or messages.
        share: share of the prompts that is held out, 0 to 1.

    Example:
        >>> [is_heldout(f"What is {i} + 1?", 0.25) for i in range(6)].count(True), is_heldout("a", 0.0)
        (1, False)
    """
    return _number(key_of(prompt)) < share * 2**64


def divided(
    things: Sequence[T], share: Any, prompt_of: Callable[[T], Any], cure: str
) -> tuple[list[T], list[T]]:
    """Return the things that are trained, and those that are held out by a share of their prompts.

    Args:
        share: ``params.heldout``, not checked yet.
        cure: what to write there instead, for the error, up to the word "share" and what it is a share of.

    Raises:
        EnvError: the share is no number, below 0, or 1 and more.

    Example:
        >>> divided(["a", "b", "c"], 0.0, str, "name a file, or a share of the rows")
        (['a', 'b', 'c'], [])
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise EnvError(f"params.heldout = {share!r}: {cure}, at least 0 and below 1")
    sides = [is_heldout(prompt_of(thing), share) for thing in things]
    pairs = list(zip(things, sides, strict=True))
    return [thing for thing, held in pairs if not held], [thing for thing, held in pairs if held]


def key_of(prompt: Any) -> str:
    """Return a text that is equal for prompts that render equally, in whatever order their keys stand.

    Example:
        >>> key_of("Hi") == key_of([{"content": "Hi", "role": "user"}])
        True
    """
    if isinstance(prompt, list) and len(prompt) == 1 and prompt[0].keys() == {"role", "content"}:
        [message] = prompt
        prompt = message["content"] if message["role"] == "user" else prompt
    return json.dumps(prompt, sort_keys=True, ensure_ascii=False)


def position(index: int, rows: int, seed: int) -> tuple[int, int]:
    """Return the row and the epoch of a task. Every row comes once in each epoch.

    Args:
        index: index of the task, from 0 on without end.
        rows: number of rows, at least 1.
        seed: seed of the order. Each epoch has an order of its own.

    Example:
        >>> sorted(position(i, 4, seed=0)[0] for i in range(4, 8)), position(5, 4, seed=0)[1]
        ([0, 1, 2, 3], 1)
    """
    epoch, place = divmod(index, rows)
    return permuted(place, rows, f"{seed} {epoch}"), epoch


def index_of(row: int, rows: int, seed: int) -> int:
    """Return the index of the task that has a row in the first epoch: the inverse of `position`.

    Example:
        >>> [index_of(position(i, 5, seed=3)[0], 5, seed=3) for i in range(5)]
        [0, 1, 2, 3, 4]
    """
    return permuted(row, rows, f"{seed} 0", back=True)


def permuted(place: int, size: int, key: str, *, back: bool = False) -> int:
    """Return where a random permutation of ``range(size)`` sends a place, or with ``back`` where it comes from.

    A Feistel network permutes the numbers of an even number of bits. A result outside the range is permuted again, so
    that the range is mapped onto itself. So no process holds a list of all rows, and all agree.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in reversed(range(ROUNDS)) if back else range(ROUNDS):
            if back:
                left, right = right ^ (_number(f"{key} {turn} {left}") & mask), left
            else:
                left, right = right, left ^ (_number(f"{key} {turn} {right}") & mask)
        place = left << half | right
        if place < size:
            return place


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def of_task(parts: Mapping[Split, Sequence[T]], index: int, split: Split, seed: int, what: str = "rows") -> T:
    """Return the row of a task: shuffled for each epoch in training, in order where it is held out.

    Args:
        parts: rows for training, and those that are held out.
        what: word for them in the error.

    Raises:
        EnvError: there are fewer held-out rows.

    Example:
        >>> of_task({"train": ["a"], "heldout": ["b", "c"]}, 1, "heldout", 0)
        'c'
    """
    rows = parts[split]
    if split == "train":
        return rows[position(index, len(rows), seed)[0]]
    if index >= len(rows):
        raise EnvError(
            f"held-out task {index}: there are {len(rows)} held-out {what}; lower learner.evaluation_tasks to "
            f"{len(rows)}"
        )
    return rows[index]
