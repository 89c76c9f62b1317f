"""Histograms with bins of a round width. Pure."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def bin_edges(values: Sequence[float], bins: int, *, whole: bool = False) -> list[float]:
    """Return the edges of equally wide bins of round width that hold all values.

    Args:
        whole: the values are whole numbers, and so are the edges.

    Example:
        >>> bin_edges([1, 7], 3), bin_edges([0.5, 0.5], 4), bin_edges([1, 3], 9, whole=True)
        ([0.0, 2.0, 4.0, 6.0, 8.0], [0.5, 1.5], [1.0, 2.0, 3.0, 4.0])
    """
    low, high = min(values), max(values)
    if low == high:
        return [float(low), float(low) + 1.0]
    width = max(1.0, (high - low) / bins) if whole else (high - low) / bins
    power = 10.0 ** math.floor(math.log10(width))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width * (1 - 1e-9))
    first = math.floor(low / width)
    count = math.floor(high / width) - first + 1
    return [round((first + i) * width, 12) for i in range(count + 1)]


def histogram(values: Sequence[float] | NDArray[Any], edges: Sequence[float]) -> list[int]:
    """Count values by bin; a bin holds its lower edge.

    Example:
        >>> histogram([0.0, 0.5, 1.0, 1.9], [0.0, 1.0, 2.0])
        [2, 2]
    """
    width, bins = edges[1] - edges[0], len(edges) - 1
    places = np.floor((np.asarray(values, np.float64) - edges[0]) / width + 1e-9).clip(0, bins - 1)
    return [int(count) for count in np.bincount(places.astype(np.int64), minlength=bins)]
