"""Chooses the few trajectories that are kept as samples. Pure."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from learner.samples.sample import SampleReason
from learner.trajectory import Trajectory
from protocol.failures import describe, failure_or_text

RANDOM = 2
"""Trajectories of a batch that are kept beside its best and its worst."""
FIRST = 3
"""Held-out tasks that are kept at every evaluation, so that one can compare their answers over time."""
FAILED = 2
"""Failed episodes that are kept each time, with different reasons."""

Choice = tuple[SampleReason, int]
"""Why a trajectory is kept, and its place in the sequence."""


def of_batch(trained: Sequence[Trajectory], rng: np.random.Generator) -> list[Choice]:
    """Return the best and the worst of a batch by return, and `RANDOM` others. A greedy baseline is left out.

    Example:
        >>> of_batch([], np.random.default_rng(0))
        []
    """
    places = [i for i, t in enumerate(trained) if not t.baseline]
    if not places:
        return []
    best, worst = _extremes(trained, places)
    chosen = dict.fromkeys((best, worst))
    others = [i for i in places if i not in chosen]
    drawn = rng.permutation(len(others))[:RANDOM].tolist()
    return [*_both(best, worst), *(("random", others[i]) for i in drawn)]


def of_evaluation(episodes: Sequence[Trajectory | None]) -> list[Choice]:
    """Return the first `FIRST` answered tasks, the best, the worst, and failed ones."""
    places = [i for i, t in enumerate(episodes) if t is not None and t.status != "failed"]
    kept: list[Choice] = [("first", i) for i in places[:FIRST]]
    others = places[FIRST:]
    if others:
        kept += _both(*_extremes(episodes, others))
    return kept + of_failed(episodes)


def of_failed(episodes: Sequence[Trajectory | None]) -> list[Choice]:
    """Return failed episodes, at most `FAILED`, each with a reason of its own."""
    reasons: dict[str, int] = {}
    for i, t in enumerate(episodes):
        if t is not None and t.status == "failed":
            reasons.setdefault(why_failed(t), i)
    return [("failed", i) for i in list(reasons.values())[:FAILED]]


def _both(best: int, worst: int) -> list[Choice]:
    return [("best", best)] if best == worst else [("best", best), ("worst", worst)]


def of_uniform(arrived: Sequence[Trajectory], trained: Sequence[Trajectory]) -> list[Choice]:
    """Return a member of the newest group whose returns are all equal, unless the batch has it.

    Such groups are not trained, as a rule. They show what is too hard or too easy for the model.
    """
    batch = {t.trajectory_id for t in trained}
    # Members of a group may arrive at different steps, and then their returns say nothing yet.
    here = Counter(t.group_id for t in arrived)
    groups: dict[str, list[int]] = {}
    for i, t in enumerate(arrived):
        whole = here[t.group_id] >= t.group_size
        if whole and t.status != "failed" and not t.baseline and t.trajectory_id not in batch:
            groups.setdefault(t.group_id, []).append(i)
    uniform = [
        places[0]
        for places in groups.values()
        if len(places) > 1 and len({arrived[i].return_ for i in places}) == 1
    ]
    return [("uniform", i) for i in uniform[-1:]]


def why_failed(t: Trajectory) -> str:
    """Return why an episode failed, in one sentence."""
    return describe(failure_or_text(t.failure, t.error))


def _extremes(episodes: Sequence[Trajectory | None], places: Sequence[int]) -> tuple[int, int]:
    """Return the places of the best and of the worst trajectory; what is solved is better than what is not."""

    def value(i: int) -> tuple[bool, float]:
        t = episodes[i]
        assert t is not None
        return t.correct is True, t.return_

    # Among equals the last one is the worst, so that two are shown.
    return max(places, key=value), min(reversed(places), key=value)
