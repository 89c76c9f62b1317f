"""Checkpoints: DeepSpeed's shards, our counters and random states in files beside them, and a pointer to the
newest checkpoint.

Layout below the folder::

    latest                    name of the newest whole checkpoint; replaced by one rename
    step00000012/...          DeepSpeed's files
    step00000012/offbeat-rank0.msgpack

All files of a checkpoint are on disk before one rename moves the pointer. So after a crash at any moment,
either the previous checkpoint or this one is in force. docs/understand/exactly-once.md explains why that
matters.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Struct

from learner.errors import CheckpointError
from learner.update.adaptive import AdaptiveState
from protocol import whole_files
from protocol.whole_files import sync_file

LATEST = "latest"


class RankState(Struct, frozen=True, kw_only=True):
    """State of one rank that DeepSpeed does not save."""

    ranks: int
    zero_stage: int
    dtype: str
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
    zero_stage: int,
    dtype: str,
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
        zero_stage=zero_stage,
        dtype=dtype,
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
    """Write a rank's state beside DeepSpeed's files."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / f"offbeat-rank{rank}.msgpack").write_bytes(msgspec.msgpack.encode(state))


def read_state(folder: Path, name: str, rank: int, *, ranks: int, zero_stage: int, dtype: str) -> RankState:
    """Return the stored state of a rank.

    Raises:
        CheckpointError: the file is unreadable, or was written with a different number of ranks, ZeRO stage
            or dtype.
    """
    path = folder / name / f"offbeat-rank{rank}.msgpack"
    try:
        state = msgspec.msgpack.decode(path.read_bytes(), type=RankState)
    except (OSError, msgspec.MsgspecError) as error:
        # This rank has no file, probably because there were fewer ranks. Rank 0's file names their number, and
        # the check below reports the difference.
        fallback = folder / name / "offbeat-rank0.msgpack"
        if rank == 0 or not fallback.exists():
            raise CheckpointError(f"{path}: {error}; resume from another checkpoint or start anew") from None
        state = msgspec.msgpack.decode(fallback.read_bytes(), type=RankState)
    if (state.ranks, state.zero_stage, state.dtype) != (ranks, zero_stage, dtype):
        raise CheckpointError(
            f"{folder / name} was written with processes={state.ranks} zero_stage={state.zero_stage} "
            f"dtype={state.dtype}, this run has processes={ranks} zero_stage={zero_stage} dtype={dtype}; "
            "resume with the former"
        )
    return state


class Standing(NamedTuple):
    """Step and lineage of a checkpoint."""

    step: int
    """Learner steps that the checkpoint covers."""
    lineage: int


def standing(folder: Path) -> Standing | None:
    """Return step and lineage of the newest whole checkpoint, from rank 0's file; None if there is none.

    Raises:
        CheckpointError: the newest checkpoint cannot be read.
    """
    if not (folder / LATEST).exists():
        return None
    path = folder / latest_name(folder) / "offbeat-rank0.msgpack"
    try:
        client = msgspec.msgpack.decode(path.read_bytes(), type=RankState).client
        return Standing(client["step"], client["curriculum"]["lineage"])
    except (OSError, msgspec.MsgspecError, KeyError) as error:
        what = f"it says nothing of {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path}: {what}; resume from another checkpoint or start anew") from None


def write_whole(folder: Path, optimizer_steps: int, write: Callable[[str], None]) -> None:
    """Write a checkpoint and, once all of it is on disk, put it in force.

    If writing fails, the incomplete folder is removed: on a full disk it would take space that the broker's
    journal needs.

    Args:
        folder: folder of all checkpoints.
        optimizer_steps: number that names the checkpoint's folder.
        write: writes all files into the folder of the name that it is given.
    """
    name = next_name(folder, optimizer_steps)
    try:
        write(name)
        sync(folder / name)
    except Exception:
        shutil.rmtree(folder / name, ignore_errors=True)
        raise
    mark_latest(folder, name)


def sync(folder: Path) -> None:
    """Sync every file below the folder to disk, and the directory entries too."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        sync_file(path)


def next_name(folder: Path, optimizer_steps: int) -> str:
    """Return an unused name for a new checkpoint, because an existing folder may be the newest whole one."""
    base = f"step{optimizer_steps:08d}"
    name, again = base, 0
    while (folder / name).exists():
        again += 1
        name = f"{base}-{again}"
    return name


def latest_name(folder: Path) -> str:
    """Return the name of the newest whole checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint in {folder} ({error.strerror}); start without resuming"
        ) from None


def mark_latest(folder: Path, name: str) -> None:
    """Point to a checkpoint that is completely written, and delete all others except the previous one."""
    previous = (folder / LATEST).read_text(encoding="utf-8").strip() if (folder / LATEST).exists() else ""
    whole_files.write_whole(folder / LATEST, name)
    for other in folder.glob("step*"):
        if other.name not in (name, previous):
            shutil.rmtree(other, ignore_errors=True)
