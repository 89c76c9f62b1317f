"""Failures of episodes: one sentence for each, and counts by kind and place. Pure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from protocol.messages.episodes import Failure
from protocol.messages.fields import MAX_FAILURE_TEXT

MAX_KINDS = 32
"""Distinct failures that are kept apart. Further ones are counted together."""
SHOWN_CHARS = 200
_NUMBER = re.compile(r"\d+")


def describe(failure: Failure) -> str:
    """Return one sentence: kind, message and place, without control characters.

    Example:
        >>> describe(Failure(kind="KeyError", message="'answer'", place="my_task.py:23"))
        "KeyError: 'answer' in my_task.py:23"
        >>> describe(Failure(message="reward 'r' is None, not a number"))
        "reward 'r' is None, not a number"
    """
    message = failure.message
    if len(message) > SHOWN_CHARS:
        message = message[:SHOWN_CHARS] + " ..."
    text = ": ".join(part for part in (failure.kind, message) if part) or "no reason given"
    text = f"{text} in {failure.place}" if failure.place else text
    return "".join(c if c.isprintable() else "?" for c in text)


def failure_or_text(failure: Failure | None, error: str) -> Failure:
    """Return the failure of a segment, or one that is made of its ``error`` if an actor sent no other.

    Example:
        >>> failure_or_text(None, "out of paper")
        Failure(kind='', message='out of paper', place='', fault=True)
    """
    return failure if failure is not None else Failure(message=error[:MAX_FAILURE_TEXT])


def _key(failure: Failure) -> tuple[str, str]:
    """Return what tells kinds of failures apart. Numbers in a message, such as a length, do not."""
    return failure.kind, failure.place or _NUMBER.sub("0", failure.message)


@dataclass
class FailureCounts:
    """Numbers of failures by kind and place, of at most `MAX_KINDS` distinct ones.

    Failures without a place are told apart by their message, except for numbers in it.

    Example:
        >>> counts = FailureCounts()
        >>> [counts.add(Failure(kind="KeyError", message=m, place="t.py:3")) for m in ("'a'", "'b'")]
        [1, 2]
        >>> counts.total, counts.sentence()
        (2, "KeyError: 'a' in t.py:3")
    """

    total: int = 0
    _kinds: dict[tuple[str, str], tuple[Failure, int]] = field(default_factory=dict)

    def add(self, failure: Failure) -> int:
        """Count a failure. Return how often it has come, or 0 if there are too many distinct ones."""
        self.total += 1
        key = _key(failure)
        first, seen = self._kinds.get(key, (failure, 0))
        if not seen and len(self._kinds) >= MAX_KINDS:
            return 0
        self._kinds[key] = (first, seen + 1)
        return seen + 1

    def most_frequent(self) -> Iterator[tuple[Failure, int]]:
        """Iterate over the first failure of each kind and its count, the most frequent kind first."""
        return iter(sorted(self._kinds.values(), key=lambda kind: -kind[1]))

    def sentence(self) -> str:
        """Return the most frequent failure and the number of other kinds, or "".

        Example:
            >>> counts = FailureCounts()
            >>> for text in ("reward is None", "reward is None", "reward is nan"):
            ...     _ = counts.add(Failure(message=text))
            >>> counts.sentence()
            'reward is None (and 1 more kind)'
        """
        kinds = list(self.most_frequent())
        if not kinds:
            return ""
        others = len(kinds) - 1
        more = f" (and {others} more kind{'s' if others > 1 else ''})" if others else ""
        return describe(kinds[0][0]) + more

    def rows(self) -> list[dict[str, Any]]:
        """Return the kinds as JSON can hold them, the most frequent first."""
        return [
            {**msgspec.structs.asdict(failure), "count": count} for failure, count in self.most_frequent()
        ]

    @classmethod
    def from_rows(cls, total: int, rows: list[Mapping[str, Any]]) -> "FailureCounts":
        """Return the counts that `rows` was called on.

        Example:
            >>> counts = FailureCounts()
            >>> _ = counts.add(Failure(kind="OSError"))
            >>> FailureCounts.from_rows(counts.total, counts.rows()) == counts
            True
        """
        kinds = dict[tuple[str, str], tuple[Failure, int]]()
        for row in rows:
            failure = Failure(**{name: row[name] for name in Failure.__struct_fields__})
            kinds[_key(failure)] = (failure, row["count"])
        return cls(total, kinds)
