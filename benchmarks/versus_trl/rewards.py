"""Reward functions of the tasks made of rows, in the form that TRL takes. Both sides call them unchanged."""

import re
from typing import Any


def letters(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Return the share of an answer's letters that stand at their places."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(a == b for a, b in zip(t, right)) / len(right) for t, right in zip(texts, answer)]  # noqa: B905


def last_number(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Return 1 for an answer whose last number is the right one, else 0."""
    numbers = [re.findall("[0-9]+", completion[0]["content"]) for completion in completions]
    return [float(found[-1:] == [right]) for found, right in zip(numbers, answer, strict=True)]
