"""Commands from rank 0 to the other ranks: typed MessagePack and raw arrays in collectives, no pickle.

Rank 0 alone talks to the rest of the world. The others sit in `Engine.follow` and do what it does.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from msgspec import Struct
from numpy.typing import NDArray

from learner.batching import Batch
from protocol.codec import pack_arrays, unpack_arrays
from protocol.messages import ArraySpec


class RunUpdate(Struct, tag="update", frozen=True):
    """Train on the batch in the body."""

    arrays: list[ArraySpec]


class GatherWeights(Struct, tag="weights", frozen=True):
    """Take part in gathering full parameters."""


class SaveCheckpoint(Struct, tag="save", frozen=True):
    """Write this rank's share of a checkpoint."""

    folder: str
    name: str


class LoadCheckpoint(Struct, tag="load", frozen=True):
    """Continue from a checkpoint."""

    folder: str
    name: str


class Finish(Struct, tag="finish", frozen=True):
    """Rank 0 is done with this engine; ``leave``: and with the process group."""

    leave: bool


Command = RunUpdate | GatherWeights | SaveCheckpoint | LoadCheckpoint | Finish
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def send(command: Command, body: bytes = b"") -> None:
    """Rank 0: tell all other ranks; collective with their `receive`."""
    header = msgspec.msgpack.encode(command)
    dist.broadcast(torch.tensor([len(header), len(body)]), src=0)
    dist.broadcast(torch.frombuffer(bytearray(header + body), dtype=torch.uint8), src=0)


def receive() -> tuple[Command, bytes]:
    """Other ranks: the next command and its body."""
    lengths = torch.zeros(2, dtype=torch.int64)
    dist.broadcast(lengths, src=0)
    header, body = lengths.tolist()
    frame = torch.empty(header + body, dtype=torch.uint8)
    dist.broadcast(frame, src=0)
    data = frame.numpy().tobytes()
    return _decoder.decode(data[:header]), data[header:]


def encode_batch(batch: Batch) -> tuple[RunUpdate, bytes]:
    """A batch as a command."""
    arrays: Mapping[str, NDArray[Any]] = {
        "lengths": batch.lengths,
        "token_ids": batch.token_ids,
        "loss_mask": batch.loss_mask.astype(np.uint8),
        "logp_behaviour": batch.logp_behaviour,
        "advantage": batch.advantage,
        "temperature": batch.temperature,
    }
    specs, body = pack_arrays(arrays)
    return RunUpdate(specs), body


def decode_batch(command: RunUpdate, body: bytes) -> Batch:
    """The batch of a command."""
    arrays = unpack_arrays(command.arrays, memoryview(bytearray(body)))  # writable, for torch.from_numpy
    return Batch(**{**arrays, "loss_mask": arrays["loss_mask"].astype(np.bool_)})
