"""Reads ``metrics.jsonl`` while a learner writes it: newest values, moving means, and each evaluation once."""

import json
import os
import re
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

SMOOTHED_STEPS = 20
"""Learner steps that the moving means cover."""
SMOOTHED = ("rollout/return_mean", "rollout/correct_share")
MEAN = "mean/"
"""Prefix of a moving mean in the values."""
EVALUATED = "evaluation/answered_tasks"
"""Metric that a line has if it reports an evaluation on `learner.evaluation_tasks`."""
NOTE = "note"
"""Key of a line that holds a sentence for a person instead of metrics."""
_OF_A_SET = re.compile(r"evaluation/([\w-]+)/answered")
_PASS_AT = re.compile(r"evaluation/(?:[\w-]+/)?pass_at_(\d+)")


class MetricsTail:
    """Follows one file. A learner that goes back to a checkpoint replaces the file by a shorter one.

    Args:
        since: seconds of the wall clock; lines of an earlier `offbeat train` are older and are not shown.
    """

    def __init__(self, since: float = 0.0) -> None:
        self._since = since
        self._inode, self._offset, self._rest = 0, 0, b""
        self._announced: Counter[tuple[float, str]] = Counter()
        self._told: set[str] = set()
        self._anew()

    def _anew(self) -> None:
        self._values: dict[str, Any] = {}
        self._recent = {name: deque[float](maxlen=SMOOTHED_STEPS) for name in SMOOTHED}
        self._seen: Counter[tuple[float, str]] = Counter()

    def read(self, path: Path) -> list[dict[str, Any]]:
        """Read what is new in the file. Return the evaluations and notes that no earlier call has returned."""
        try:
            with open(path, "rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return []

    def _read(self, file: BinaryIO) -> list[dict[str, Any]]:
        stat = os.fstat(file.fileno())
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._inode, self._offset, self._rest = stat.st_ino, 0, b""
            self._anew()
        file.seek(self._offset)
        *lines, self._rest = (self._rest + file.read()).split(b"\n")
        self._offset = file.tell()
        evaluations = [line for text in lines if (line := self._line(text)) is not None]
        if stat.st_mtime < self._since:
            # They were shown by the `offbeat train` that this one resumes.
            self._values = {}
            return []
        return evaluations

    def _line(self, text: bytes) -> dict[str, Any] | None:
        try:
            line = json.loads(text)
        except ValueError:
            return None
        if NOTE in line:
            told = line[NOTE] in self._told
            self._told.add(line[NOTE])
            return None if told else dict(line)
        self._values.update(line)
        for name, recent in self._recent.items():
            if name in line:
                recent.append(line[name])
        evaluated = set_of(line)
        if evaluated is None:
            return None
        if not evaluated:
            self._values["evaluation_step"] = line["step"]
            for name in ("evaluation/accuracy", "evaluation/return_mean"):
                if name not in line:
                    self._values.pop(name, None)
        key = line["step"], evaluated
        self._seen[key] += 1
        if self._seen[key] <= self._announced[key]:
            return None
        self._announced[key] += 1
        return dict(line)

    @property
    def values(self) -> dict[str, Any]:
        """Newest value of each metric, and moving means under `MEAN`; empty before the first new line."""
        if not self._values:
            return {}
        means = {MEAN + name: sum(recent) / len(recent) for name, recent in self._recent.items() if recent}
        return {**self._values, **means}


def sentence(line: dict[str, Any]) -> str:
    """Return an evaluation or a note of ``metrics.jsonl`` in words."""
    return str(line[NOTE]) if NOTE in line else evaluation_sentence(line)


def set_of(line: Mapping[str, Any]) -> str | None:
    """Return the name of the evaluation set that a line reports, "" for the unnamed one; None if it reports none.

    Example:
        >>> set_of({"evaluation/hard/answered": 8.0}), set_of({EVALUATED: 8.0}), set_of({"step": 1})
        ('hard', '', None)
    """
    if EVALUATED in line:
        return ""
    return next((match[1] for name in line if (match := _OF_A_SET.fullmatch(name))), None)


def evaluation_sentence(line: dict[str, Any]) -> str:
    """Return an evaluation's line of ``metrics.jsonl`` in words.

    Example:
        >>> counts = {"step": 10, "evaluation/answered_tasks": 63.0, "evaluation/failed_tasks": 1.0}
        >>> evaluation_sentence(counts | {"evaluation/accuracy": 0.5, "evaluation/return_mean": 0.75})
        'evaluation at step 10: held-out accuracy 0.500, return 0.750 (63 tasks answered, 1 failed)'
        >>> evaluation_sentence(counts | {"evaluation/not_run_tasks": 9.0})
        'evaluation at step 10: no result (63 tasks answered, 1 failed, 9 never run)'
        >>> hard = {"step": 10, "evaluation/hard/answered": 32.0, "evaluation/hard/accuracy": 0.5}
        >>> evaluation_sentence(hard | {"evaluation/hard/pass_at_4": 0.75})
        'evaluation hard at step 10: held-out accuracy 0.500, pass@4 0.750 (32 answers)'
    """
    name = set_of(line)
    prefix, ending = (f"evaluation/{name}/", "") if name else ("evaluation/", "_tasks")
    counts = [f"{line[f'{prefix}answered{ending}']:.0f} {'answers' if name else 'tasks answered'}"]
    for metric, words in (("failed", "failed"), ("not_run", "never run")):
        if number := line.get(f"{prefix}{metric}{ending}"):
            counts.append(f"{number:.0f} {words}")
    what = f"evaluation {name}" if name else "evaluation"
    return (
        f"{what} at step {line['step']}: {held_out(line, prefix=prefix) or 'no result'} ({', '.join(counts)})"
    )


def held_out(values: dict[str, Any], digits: int = 3, prefix: str = "evaluation/") -> str:
    """Return accuracy, pass@k and return on held-out tasks in words, as far as they are known.

    Example:
        >>> held_out({"evaluation/return_mean": 0.75}, digits=2)
        'held-out return 0.75'
    """
    tries = sorted(
        int(match[1])
        for name in values
        if name.startswith(prefix) and (match := _PASS_AT.fullmatch(name)) and "/" not in name[len(prefix) :]
    )
    words = {"accuracy": "accuracy", **{f"pass_at_{k}": f"pass@{k}" for k in tries}, "return_mean": "return"}
    means = [
        f"{word} {values[prefix + metric]:.{digits}f}"
        for metric, word in words.items()
        if prefix + metric in values
    ]
    return f"held-out {', '.join(means)}" if means else ""
