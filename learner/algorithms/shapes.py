"""Shape checks in the first lines of public functions, before broadcasting can hide a wrong shape.

This file imports no torch, because functions of numpy arrays use it, too.
"""

from collections.abc import Mapping
from typing import Protocol


class _Shaped(Protocol):
    """A tensor or an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def check_same_shape(**tensors: _Shaped | float | None) -> None:
    """Raise unless all tensors have one shape.

    Numbers, and tensors without dimensions, fit every shape, because they broadcast as numbers. None stands
    for a tensor that was not given, and is not compared. Shapes are host data, so the check never waits for a
    GPU.

    Args:
        tensors: torch tensors or numpy arrays, by the name that the error shows.

    Raises:
        ValueError: two of the tensors differ in shape.

    Example:
        >>> import numpy as np
        >>> check_same_shape(ratio=np.ones(3), advantage=np.zeros(3), low=0.2, before=None)
        >>> check_same_shape(ratio=np.ones(3), advantage=np.zeros((3, 1)))
        Traceback (most recent call last):
        ValueError: tensors must have one shape, got ratio (3,), advantage (3, 1)
    """
    first = None
    for tensor in tensors.values():
        if shape := getattr(tensor, "shape", None):
            if first is None:
                first = shape
            elif shape != first:
                raise ValueError(f"tensors must have one shape, got {_listed(tensors)}")


def _listed(tensors: Mapping[str, _Shaped | float | None]) -> str:
    shapes = ((name, getattr(tensor, "shape", ())) for name, tensor in tensors.items())
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes if shape)
