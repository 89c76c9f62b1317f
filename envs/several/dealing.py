"""Which environment a task belongs to, by its index and the weights. Pure."""

from collections.abc import Sequence

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
