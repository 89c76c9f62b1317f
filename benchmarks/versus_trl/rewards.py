"""Reward functions of the tasks made of rows, in the form that TRL takes. Both sides call them unchanged."""

from typing import Any


def letters(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Return the share of an answer's letters that stand at their places."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(a == b for a, b in zip(t, right)) / len(right) for t, right in zip(texts, answer)]  # noqa: B905


def exact(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Return 1 for an answer that is the right one, else 0."""
    texts = [completion[0]["content"].strip() for completion in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]
