"""Answers with known scores, which find a scorer that was tampered with.

An answer that runs as code might change the process that scores the next answers. Canaries are answers that
are known to be right or wrong. A worker scores them when it is fresh, before it meets any answer of a model.
Later they must get the same scores. The questions are drawn at random, so that an answer cannot know them.
"""

import secrets
from collections.abc import Callable
from typing import NamedTuple

from envs.errors import ScorerFailed

QUESTIONS = 4
"""Number of questions of which canaries are made."""
MOST_DRAWN = 16
"""Most questions that are drawn; the library has no solution for some."""
INDICES = 1_000
"""The questions are drawn from the tasks below this index."""


class Canary(NamedTuple):
    """An answer to the entry at a position of the library, and the score that it must get."""

    position: int
    answer: str
    score: float


def choose_canaries(
    solution: Callable[[int], tuple[int, str | None]], score: Callable[[int, str], float]
) -> list[tuple[Canary, Canary]]:
    """Return pairs of a right and a wrong answer to one question. The wrong one names a second solution.

    Args:
        solution: returns the position of task ``index``, and the library's solution, or None.
        score: scores an answer in a worker that has met no answer of a model.

    Raises:
        ScorerFailed: the scores of right and wrong answers are equal for all questions.

    Example:
        >>> pairs = choose_canaries(lambda i: (64 * i, str(i)), lambda place, answer: float(answer == str(place // 64)))
        >>> [(right.score, wrong.score) for right, wrong in pairs]
        [(1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0)]
    """
    solutions: list[tuple[int, str]] = []
    for index in secrets.SystemRandom().sample(range(INDICES), MOST_DRAWN):
        position, text = solution(index)
        if text:
            solutions.append((position, text))
        if len(solutions) == QUESTIONS:
            break
    pairs = []
    for (position, right), (_, other) in zip(solutions, solutions[1:] + solutions[:1], strict=True):
        wrong = f"{right} {other}"
        pair = (
            Canary(position, right, score(position, right)),
            Canary(position, wrong, score(position, wrong)),
        )
        if pair[0].score > pair[1].score:
            pairs.append(pair)
    if not pairs:
        raise ScorerFailed(f"none of {len(solutions)} questions tells right answers from wrong ones")
    return pairs
