"""Commands from rank 0 to the other ranks: typed MessagePack and raw arrays in collectives, no pickle.

Only rank 0 talks to other processes of the run. The other ranks run `TrainingEngine.follow` and carry out the
commands.
"""

import json
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from blake3 import blake3
from msgspec import Struct
from numpy.typing import NDArray

from learner.errors import HostsDiffer
from learner.formulas import hashes
from learner.settings.learner import LearnerConfig
from learner.update.batch import Batch, BatchBranches, BatchRoutes
from protocol.arrays import ROUTED_EXPERTS, ROUTED_TOKEN
from protocol.codec import pack_arrays, unpack_arrays
from protocol.messages.fields import ArraySpec

COLUMN = "column."
"""Prefix of the arrays that are columns of a batch."""


class RunUpdate(Struct, tag="update", frozen=True):
    """Train on the batch in the body."""

    arrays: list[ArraySpec]
    """Arrays in the body, from `encode_batch`; `decode_batch` reads them."""
    version: int = 0
    """Policy version that the batch updates."""


class RunEstimate(Struct, tag="estimate", frozen=True):
    """Estimate values of the batch in the body."""

    arrays: list[ArraySpec]
    """Arrays in the body, from `encode_batch`; `decode_batch` reads them."""
    version: int = 0
    """Policy version that the batch updates."""


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


SHARED_SETTINGS = {
    "algorithm", "optimizer", "lora", "steps", "processes", "nodes", "zero_stage", "dtype", "offload",
    "micro_batch_tokens", "share_prefixes", "gradient_checkpointing",
}  # fmt: skip
"""Settings of the learner that every rank reads."""
NAME_BYTES = 64
"""Bytes of a host's name in the messages of `check_hosts`."""


def check_hosts(config: LearnerConfig, run_dir: Path, *, model: Path, seed: int) -> None:
    """Make sure that all ranks have the same settings and model, and see the run folder of rank 0.

    Checkpoints lie in the run folder, where each rank writes its share and reads the others'. This is a collective
    call, and either no rank raises or all do.

    Args:
        model: folder of the model, of which names and sizes of files are compared; nothing if it is no folder.

    Raises:
        HostsDiffer: the message names the hosts that differ from rank 0, or do not see its folder.
    """
    sizes = sorted((path.name, path.stat().st_size) for path in model.glob("*") if path.is_file())
    settings, formulas = config.model_dump_json(include=SHARED_SETTINGS), sorted(hashes(config).items())
    told = [settings, formulas, seed, torch.__version__, sizes, str(run_dir)]
    digest = blake3(json.dumps(told).encode()).digest()
    nonce = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
    dist.broadcast(nonce, src=0)
    sign = run_dir / f".learner-{nonce.numpy().tobytes().hex()}"
    if dist.get_rank() == 0:
        sign.touch()
    dist.barrier()
    seen, name = bytes([sign.exists()]), socket.gethostname().encode()[:NAME_BYTES].ljust(NAME_BYTES)
    answers = _from_all(name + seen + digest)
    if dist.get_rank() == 0:
        sign.unlink()
    hosts = [
        (f"{answer[:NAME_BYTES].decode(errors='replace').strip()} (rank {rank})", answer[NAME_BYTES:])
        for rank, answer in enumerate(answers)
    ]
    if blind := [host for host, answer in hosts if not answer[0]]:
        raise HostsDiffer(
            f"{', '.join(blind)} does not see the run folder {run_dir} of rank 0, where checkpoints lie; put run.dir "
            "on a file system that all hosts of the learner share, and give all of them the same run.name"
        )
    if differing := [host for host, answer in hosts if answer[1:] != hosts[0][1][1:]]:
        raise HostsDiffer(
            f"{', '.join(differing)}: settings of [learner], files of formulas, run.seed, path of the run folder, "
            "model or version of torch differ from those of rank 0; give all hosts of the learner one run file, one "
            "path of the run folder, one model folder and one installation"
        )


def _from_all(message: bytes) -> list[bytes]:
    """Return the messages of all ranks, which have the same length. This is a collective call."""
    gathered = [torch.empty(len(message), dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.frombuffer(bytearray(message), dtype=torch.uint8))
    return [part.numpy().tobytes() for part in gathered]


def receive() -> tuple[Command, bytes]:
    """Return the next command and its body, on the ranks other than 0."""
    lengths = torch.zeros(2, dtype=torch.int64)
    dist.broadcast(lengths, src=0)
    header, body = lengths.tolist()
    frame = torch.empty(header + body, dtype=torch.uint8)
    dist.broadcast(frame, src=0)
    data = frame.numpy().tobytes()
    return _decoder.decode(data[:header]), data[header:]


class OtherRanks:
    """The ranks above 0, to which rank 0 sends commands; without any, nothing is sent.

    Each command is a collective call with their `receive`.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def send_update(self, batch: Batch) -> None:
        """Let them train on a batch."""
        if self._count:
            _send(*encode_batch(RunUpdate, batch))

    def send_estimate(self, batch: Batch) -> None:
        """Let them estimate the values of a batch."""
        if self._count:
            _send(*encode_batch(RunEstimate, batch))

    def send_gather(self) -> None:
        """Let them take part in gathering full parameters."""
        if self._count:
            _send(GatherWeights())

    def send_save(self, folder: Path, name: str) -> None:
        """Let them write their shares of a checkpoint."""
        if self._count:
            _send(SaveCheckpoint(str(folder), name))

    def send_load(self, folder: Path, name: str) -> None:
        """Let them continue from a checkpoint."""
        if self._count:
            _send(LoadCheckpoint(str(folder), name))

    def send_finish(self, *, leave: bool) -> None:
        """Let them free their engines, and leave the process group if that is the end."""
        if self._count:
            _send(Finish(leave=leave))


def _send(command: Command, body: bytes = b"") -> None:
    """Send a command from rank 0 to all other ranks. This is a collective call with their `receive`."""
    header = msgspec.msgpack.encode(command)
    dist.broadcast(torch.tensor([len(header), len(body)]), src=0)
    dist.broadcast(torch.frombuffer(bytearray(header + body), dtype=torch.uint8), src=0)


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
        **_encoded_branches(batch.branches),
        **(
            {}
            if batch.routes is None
            else {ROUTED_TOKEN: batch.routes.token, ROUTED_EXPERTS: batch.routes.experts}
        ),
        **{COLUMN + name: column for name, column in batch.columns.items()},
    }
    specs, body = pack_arrays(arrays)
    return command(specs, batch.version), body


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
        branches=_decoded_branches(arrays),
        routes=BatchRoutes(arrays[ROUTED_TOKEN], arrays[ROUTED_EXPERTS]) if ROUTED_TOKEN in arrays else None,
        columns={
            name.removeprefix(COLUMN): array for name, array in arrays.items() if name.startswith(COLUMN)
        },
        version=command.version,
    )


def _encoded_branches(branches: BatchBranches | None) -> dict[str, NDArray[Any]]:
    if branches is None:
        return {}
    return {
        "owner": branches.owner,
        "branch_lengths": branches.lengths,
        "places": branches.places,
        "own": branches.own.astype(np.uint8),
    }


def _decoded_branches(arrays: Mapping[str, NDArray[Any]]) -> BatchBranches | None:
    if "owner" not in arrays:
        return None
    own = arrays["own"].astype(np.bool_)
    return BatchBranches(arrays["owner"], arrays["branch_lengths"], arrays["places"], own)
