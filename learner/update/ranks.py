"""Commands from rank 0 to the other ranks: typed MessagePack and raw arrays in collectives, no pickle.

Only rank 0 talks to other processes of the run. The other ranks run `TrainingEngine.follow` and carry out the
commands.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from msgspec import Struct
from numpy.typing import NDArray

from learner.update.batching import Batch
from protocol.codec import pack_arrays, unpack_arrays
from protocol.messages import ArraySpec

COLUMN = "column."
"""Prefix of the arrays that are columns of a batch."""


class RunUpdate(Struct, tag="update", frozen=True):
    """Train on the batch in the body."""

    arrays: list[ArraySpec]
    """Arrays in the body, from `encode_batch`; `decode_batch` reads them."""


class RunEstimate(Struct, tag="estimate", frozen=True):
    """Estimate values of the batch in the body."""

    arrays: list[ArraySpec]
    """Arrays in the body, from `encode_batch`; `decode_batch` reads them."""


class GatherWeights(Struct, tag="weights", frozen=True):
    """Take part in gathering full parameters."""


class SaveCheckpoint(Struct, tag="save", frozen=True):
    """Write this rank's share of a checkpoint."""

    folder: str
    """Folder of all checkpoints of the run."""
    name: str
    """Name of the new checkpoint in that folder, so that all ranks write the same one."""


class LoadCheckpoint(Struct, tag="load", frozen=True):
    """Continue from a checkpoint."""

    folder: str
    """Folder of all checkpoints of the run."""
    name: str
    """Name of the checkpoint in that folder, so that all ranks read the same one."""


class Finish(Struct, tag="finish", frozen=True):
    """Free the engine, because rank 0 is done with it."""

    leave: bool
    """True if the ranks must leave the process group, too."""


Command = RunUpdate | RunEstimate | GatherWeights | SaveCheckpoint | LoadCheckpoint | Finish
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def send(command: Command, body: bytes = b"") -> None:
    """Send a command from rank 0 to all other ranks. This is a collective call with their `receive`."""
    header = msgspec.msgpack.encode(command)
    dist.broadcast(torch.tensor([len(header), len(body)]), src=0)
    dist.broadcast(torch.frombuffer(bytearray(header + body), dtype=torch.uint8), src=0)


def receive() -> tuple[Command, bytes]:
    """Return the next command and its body, on the ranks other than 0."""
    lengths = torch.zeros(2, dtype=torch.int64)
    dist.broadcast(lengths, src=0)
    header, body = lengths.tolist()
    frame = torch.empty(header + body, dtype=torch.uint8)
    dist.broadcast(frame, src=0)
    data = frame.numpy().tobytes()
    return _decoder.decode(data[:header]), data[header:]


def encode_batch(
    command: type[RunUpdate] | type[RunEstimate], batch: Batch
) -> tuple[RunUpdate | RunEstimate, bytes]:
    """Return a command for a batch, and the body with the batch."""
    arrays: Mapping[str, NDArray[Any]] = {
        "lengths": batch.lengths,
        "temperature": batch.temperature,
        "group": batch.group,
        "token_ids": batch.token_ids,
        "loss_mask": batch.loss_mask.astype(np.uint8),
        "seen_mask": batch.seen_mask.astype(np.uint8),
        "owner": batch.owner,
        "branch_lengths": batch.branch_lengths,
        "places": batch.places,
        "own": batch.own.astype(np.uint8),
        **{COLUMN + name: column for name, column in batch.columns.items()},
    }
    specs, body = pack_arrays(arrays)
    return command(specs), body


def decode_batch(command: RunUpdate | RunEstimate, body: bytes) -> Batch:
    """Return the batch of a command."""
    # A bytearray is writable, as torch.from_numpy needs.
    arrays = unpack_arrays(command.arrays, memoryview(bytearray(body)))
    return Batch(
        lengths=arrays["lengths"],
        temperature=arrays["temperature"],
        group=arrays["group"],
        token_ids=arrays["token_ids"],
        loss_mask=arrays["loss_mask"].astype(np.bool_),
        seen_mask=arrays["seen_mask"].astype(np.bool_),
        owner=arrays["owner"],
        branch_lengths=arrays["branch_lengths"],
        places=arrays["places"],
        own=arrays["own"].astype(np.bool_),
        columns={
            name.removeprefix(COLUMN): array for name, array in arrays.items() if name.startswith(COLUMN)
        },
    )
