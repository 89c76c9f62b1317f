"""The order in which an actor tries generators that are equally busy. Pure."""

from collections.abc import Iterable

GOLDEN = 0.6180339887498949
"""Fractional part of the golden ratio: its multiples modulo 1 spread evenly, however many there are."""


def order(generators: Iterable[str], place: int) -> dict[str, float]:
    """Return the rank of each generator for the actor at this place; the lowest one comes first.

    Generators stand on a circle, in the order of their names. Each actor begins at another point of it. An actor
    sees its own requests alone, so without different orders all actors would choose the same generators. If all
    actors together run twice as many requests as there are generators, then no generator is idle.

    Args:
        generators: names of the generators.
        place: number of the actor among all actors, from 0 on (`protocol.messages.Welcome.place`).

    Example:
        >>> ranks = order(["g0", "g1", "g2", "g3"], place=1)
        >>> sorted(ranks, key=ranks.get)
        ['g3', 'g0', 'g1', 'g2']
    """
    names = sorted(generators)
    return {name: (i / len(names) - place * GOLDEN) % 1.0 for i, name in enumerate(names)}
