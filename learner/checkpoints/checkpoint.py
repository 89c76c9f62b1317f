"""Checkpoints: the state of a rank beside weights and optimizer (`learner.checkpoints.shards`).

All files of a checkpoint are on disk before one rename moves the pointer to it (`checkpoint_files`). So after
a crash at any moment, either the previous checkpoint or this one is in force.
docs/understand/exactly-once.md explains why that matters.
"""

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct

from learner.checkpoints.checkpoint_files import cure
from learner.errors import CheckpointError
from learner.update.objective.adaptive import AdaptiveState


class RankState(Struct, frozen=True, kw_only=True):
    """State of one rank beside weights and optimizer."""

    ranks: int
    """Ranks of the learner that wrote the checkpoint."""
    dtype: str
    lora: str = ""
    """Settings of the adapters, which are then all that is saved of the policy; "" if all its weights are."""
    base: str = ""
    """Hash of the weights that the adapters belong to, which are not in the checkpoint."""
    updates: int
    optimizer_steps: int
    adaptive: AdaptiveState
    torch_rng: bytes
    numpy_rng: tuple[str, bytes, int, int, float]
    python_rng: tuple[int, list[int], float | None]
    client: dict[str, Any]


def capture(
    *,
    ranks: int,
    dtype: str,
    lora: str = "",
    base: str = "",
    updates: int,
    optimizer_steps: int,
    adaptive: AdaptiveState,
    client: dict[str, Any],
) -> RankState:
    """Return the state of this rank now, the states of its random generators included."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return RankState(
        ranks=ranks,
        dtype=dtype,
        lora=lora,
        base=base,
        updates=updates,
        optimizer_steps=optimizer_steps,
        adaptive=adaptive,
        torch_rng=torch.get_rng_state().numpy().tobytes(),
        numpy_rng=(str(kind), np.asarray(keys).tobytes(), int(position), int(has_gauss), float(cached)),
        python_rng=(version, list(internal), gauss),
        client=client,
    )


def restore_random(state: RankState) -> None:
    """Set the random generators of this process to the stored states."""
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch_rng), dtype=torch.uint8))
    kind, keys, position, has_gauss, cached = state.numpy_rng
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = state.python_rng
    random.setstate((version, tuple(internal), gauss))


def write_state(folder: Path, name: str, rank: int, state: RankState) -> None:
    """Write a rank's state into a checkpoint."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / f"offbeat-rank{rank}.msgpack").write_bytes(msgspec.msgpack.encode(state))


def read_state(
    folder: Path, name: str, rank: int, *, dtype: str, lora: str = "", base: str = ""
) -> RankState:
    """Return the stored state of a rank; that of rank 0 for a rank that there was not when the checkpoint was written.

    Raises:
        CheckpointError: the file is unreadable, or was written with a different dtype, adapters, or weights that the
            adapters belong to.
    """
    state = _decoded(folder, name, 0)
    if 0 < rank < state.ranks:
        state = _decoded(folder, name, rank)
    if state.dtype != dtype:
        raise CheckpointError(
            f"{folder / name} was written with learner.dtype = {state.dtype!r}, this run has {dtype!r}; resume with "
            "the former"
        )
    if state.lora != lora:
        theirs, ours = (words or "none" for words in (state.lora, lora))
        raise CheckpointError(
            f"{folder / name} was written with learner.lora: {theirs}; this run has: {ours}; resume with the former"
        )
    if state.base != base:
        raise CheckpointError(
            f"{folder / name} holds adapters only, and the weights that they belong to are not those of the model "
            "folder; resume with the model that the run began with"
        )
    return state


def _decoded(folder: Path, name: str, rank: int) -> RankState:
    path = folder / name / f"offbeat-rank{rank}.msgpack"
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=RankState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}; {cure(folder, name)}") from None
