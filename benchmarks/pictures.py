"""Matplotlib for pictures of results."""

from typing import Any


def pyplot() -> Any:
    """With a backend that needs no screen; loaded only for a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
