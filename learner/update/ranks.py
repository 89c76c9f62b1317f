"""The ranks of a learner: DeepSpeed ZeRO over them, and commands from rank 0 to the others.

Everything that depends on how DeepSpeed trains is here, and so is the gathering of weights. Gradients are sums over
micro-batches, whose losses already have the global denominator. DeepSpeed averages over ranks, so the loss is
multiplied by the number of ranks. A step with a gradient that is not finite is skipped on all ranks: by DeepSpeed from
stage 1 on, and by `finish_step` at stage 0, where DeepSpeed would apply it.

From stage 2 on, the gradients of each micro-batch are reduced at once and added to the sums, of which each rank
holds its share in float32. Gradients in bfloat16 that were summed in bfloat16 would lose what is small beside the
sum: the error grows with the number of micro-batches.

Commands are typed MessagePack and raw arrays in collectives, no pickle. Only rank 0 talks to other processes of the
run. The other ranks run `TrainingEngine.follow` and carry out the commands.
"""

import json
import logging
import os
import secrets
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from blake3 import blake3
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor, nn

from learner.errors import HostsDiffer
from learner.formulas import hashes
from learner.settings.learner import REDUCE_BUCKET, LearnerConfig
from learner.update.batch import Batch, BatchBranches, BatchRoutes
from learner.update.lora import Adapter, adapters, published_name
from protocol.arrays import ROUTED_EXPERTS, ROUTED_TOKEN
from protocol.codec import pack_arrays, unpack_arrays
from protocol.messages.fields import ArraySpec
from protocol.weights.format import ADAPTER_DOWN, ADAPTER_UP, TORCH_DTYPES, WEIGHT

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives; longer than rank 0 may ever wait for data."""


@dataclass(frozen=True)
class OptimizerStep:
    """Result of an optimizer step: whether the weights moved, and the gradient norm before clipping."""

    applied: bool
    gradient_norm: float


def join_ranks(config: LearnerConfig) -> tuple[int, int]:
    """Form the process group, unless it is there, and return (rank, number of ranks).

    Raises:
        RuntimeError: more than one process is wanted, but torchrun did not start this one; or a different number of
            processes was started.
    """
    wanted = f"learner.processes is {config.processes}"
    wanted += f" on each of {config.nodes} hosts" if config.nodes > 1 else ""
    os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if config.ranks == 1:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        elif "RANK" not in os.environ:
            raise RuntimeError(
                f"{wanted}, but RANK is not set, so this process was started alone; start all of them with "
                "`offbeat train` or launch/scripts/learner.sh, or set learner.processes to 1"
            )
        else:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks != config.ranks:
        raise RuntimeError(f"{wanted}, but {ranks} were started; make them equal")
    return rank, ranks


def deepspeed_config(config: LearnerConfig, ranks: int) -> dict[str, Any]:
    """Return the settings for `deepspeed.initialize`. Settings with a surprising default are explicit."""
    settings: dict[str, Any] = {
        # The next three only satisfy DeepSpeed's arithmetic: the learner forms its micro-batches itself.
        "train_batch_size": ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": config.zero_stage_used},
        "steps_per_print": 2**31 - 1,
    }
    if config.dtype_used == "bfloat16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.offload == "optimizer":
        place = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        settings["zero_optimization"]["offload_optimizer"] = place
        # DeepSpeed's own AdamW for CPUs needs a compiler. Torch's fused one is as fast there.
        settings["zero_force_ds_cpu_optimizer"] = False
    return settings


def initialise(module: nn.Module, config: LearnerConfig, ranks: int) -> Any:
    """Make the DeepSpeed engine of a policy or critic, with AdamW.

    Raises:
        ValueError: stage 0 or 1 with bfloat16, where gradients would be summed in bfloat16.
    """
    if config.zero_stage_used < 2 and config.dtype_used == "bfloat16":
        raise ValueError(
            f"learner.zero_stage is {config.zero_stage_used} and learner.dtype is bfloat16: gradients would be summed "
            "in bfloat16, which loses small ones; set learner.zero_stage to 2 or 3"
        )
    deepspeed = _deepspeed()
    # What was added to a model that was cut while it was loaded is still in the host's memory.
    device = deepspeed.accelerator.get_accelerator().current_device_name()
    for tensor in [*module.parameters(), *module.buffers()]:
        if config.zero_stage_used == 3 and not hasattr(tensor, "ds_id"):
            tensor.data = tensor.data.to(device)
    optimizer = torch.optim.AdamW(
        _parameter_groups(module),
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        fused=True,
    )
    settings = deepspeed_config(config, ranks)
    # DeepSpeed makes the whole bucket, however few gradients there are: 2 GB in float32 for a model of any size.
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters() if p.requires_grad)
    settings["zero_optimization"]["reduce_bucket_size"] = min(REDUCE_BUCKET, trained)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    # A single rank has nothing to reduce; this saves copying all gradients to a buffer and back.
    if config.zero_stage_used == 0 and ranks == 1:
        engine.enable_backward_allreduce = False
    engine.train()
    return engine


def _deepspeed() -> Any:
    """Import DeepSpeed, quietly and without what it would compile."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Gloo alone is equally fast, and at the first start DeepSpeed would compile the shared-memory operator for
    # minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class _Cut:
    """Answers what transformers asks about DeepSpeed while it loads a model."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        """Return whether each parameter is cut as soon as it is made."""
        return True


@contextmanager
def cut_while_loading(config: LearnerConfig, ranks: int) -> Iterator[None]:
    """Let transformers load a model of which each rank holds its share only, if the ZeRO stage is 3.

    One layer at a time is whole. The process group must be formed.

    DeepSpeed would give every number that the model makes the float type of its weights. The frequencies of rotary
    embeddings are made in float32, though, and must stay so: in bfloat16 the gradient of rows of 12 tokens was 1.3 %
    off.
    """
    if config.zero_stage_used < 3:
        yield
        return
    from transformers.integrations import deepspeed as integration

    deepspeed = _deepspeed()
    # Without its own view of the process group, DeepSpeed takes every run for one of a single rank.
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    zero = deepspeed.zero
    whole_init = zero.Init
    # transformers keeps a weak reference only.
    cut = _Cut(deepspeed_config(config, ranks))
    integration.set_hf_deepspeed_config(cut)
    zero.Init = partial(whole_init, tensor_overrides=[zero.DeepSpeedTensorOverride.device])
    try:
        yield
    finally:
        zero.Init = whole_init
        integration.unset_hf_deepspeed_config()


def _parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters that are trained, the value head apart, because its learning rate differs."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    head = [p for name, p in trained.items() if name.startswith("value_head.")]
    rest = [p for name, p in trained.items() if not name.startswith("value_head.")]
    return [{"params": rest}, {"params": head}] if head else [{"params": rest}]


@contextmanager
def accumulation(engine: Any, ranks: int) -> Iterator[Callable[[Tensor, bool], None]]:
    """Sum gradients of several losses for one step.

    Yields a function of (loss, whether it is the last). Within one accumulation every rank must call it the
    same number of times.
    """
    # At stage 1 every rank holds all gradients, so that reducing their sums once is enough.
    if engine.zero_optimization_stage() == 1:
        with engine.coalesce_grad_reduction():
            yield lambda loss, _: engine.backward(loss * ranks, scale_wrt_gas=False)
        return

    def backward(loss: Tensor, last: bool) -> None:
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss * ranks, scale_wrt_gas=False)

    yield backward


def finish_step(engine: Any, lr: float, head_lr: float = 0.0) -> OptimizerStep:
    """Clip the gradient and move the weights. Skip the step if the gradient is not finite on some rank."""
    for i, group in enumerate(engine.optimizer.param_groups):
        group["lr"] = head_lr if i else lr
    if engine.zero_optimization_stage() > 0:
        engine.step()
        norm = engine.get_global_grad_norm()
        return OptimizerStep(bool(engine.was_step_applied()), float("nan") if norm is None else float(norm))
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    gradient_norm = float(torch.nn.utils.get_total_norm(gradients))
    # Invariant: all ranks take the same branch, because their gradients are reduced already. The difference
    # is NaN if the norm is not finite.
    if gradient_norm - gradient_norm != 0:
        engine.zero_grad()
        return OptimizerStep(False, gradient_norm)
    engine.step()
    return OptimizerStep(True, gradient_norm)


def sum_over_ranks(values: Tensor, ranks: int) -> Tensor:
    """Sum values over all ranks, in place, and return them. This is a collective call."""
    if ranks > 1:
        dist.all_reduce(values)
    return values


def least_over_ranks(value: int, ranks: int) -> int:
    """Return the least of the ranks' values. This is a collective call."""
    least = torch.tensor(value)
    if ranks > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


GATHER_BYTES = 64 * 2**20
"""Bytes of full parameters held at once when sharded ones are gathered; a larger tensor is gathered alone."""
SAFETENSORS_NAMES = {getattr(torch, dtype): name for name, dtype in TORCH_DTYPES.items()}


class _Weight(NamedTuple):
    """A tensor of the model, or of a shard of it, and the name that it gets outside."""

    name: str
    tensor: Tensor
    adapter: Adapter | None = None
    """Adapter that is merged into the tensor."""
    factor: float = 1.0
    """What the tensor is multiplied with."""

    @property
    def parts(self) -> list[Tensor]:
        """Tensors that must be gathered for `merged`."""
        return [self.tensor] if self.adapter is None else [self.tensor, self.adapter.down, self.adapter.up]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts when they are gathered."""
        return sum(getattr(part, "ds_numel", part.numel()) * part.element_size() for part in self.parts)

    def merged(self) -> Tensor:
        """Return the tensor, with its adapter, on its device."""
        tensor = self.tensor.detach()
        if self.factor != 1.0:
            return (tensor.float() * self.factor).to(tensor.dtype).contiguous()
        return (tensor if self.adapter is None else self.adapter.merged(tensor)).contiguous()


def weight_shapes(engine: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return ``name -> (safetensors dtype, shape)`` with the names of the model's folder; tied tensors appear once."""
    weights = (
        (
            w.name,
            torch.empty(getattr(w.tensor, "ds_shape", w.tensor.shape), dtype=w.tensor.dtype, device="meta"),
        )
        for w in _model_weights(engine)
    )
    return {
        name: (SAFETENSORS_NAMES[tensor.dtype], tuple(tensor.shape))
        for whole in weights
        for name, tensor in as_in_folder(engine.module.lm, *whole)
    }


def gathered_weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors in the order of `weight_shapes`, on their device. Each is valid until the next one.

    Adapters are merged into their layers. At stage 3 this is a collective call: every rank must iterate to the end.
    """
    for name, tensor in _gathered(engine, _model_weights(engine)):
        yield from as_in_folder(engine.module.lm, name, tensor)


def as_in_folder(lm: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight of a model as its folder has it, under the folder's names.

    transformers keeps the experts of a mixture in one tensor. Folders, and vLLM, have a tensor for each expert.

    Args:
        lm: model of transformers, which knows how it was put together.
    """
    if not getattr(lm, "_weight_conversions", None):
        yield name, tensor
        return
    from transformers.core_model_loading import revert_weight_conversion

    for own, part in revert_weight_conversion(lm, {name: tensor}).items():
        yield own, part.contiguous()


def adapter_weight_shapes(engine: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return ``name -> (safetensors dtype, shape)`` of the adapters as a version has them, see `adapter_shapes`."""
    return {
        weight.name: (
            SAFETENSORS_NAMES[weight.tensor.dtype],
            tuple(getattr(weight.tensor, "ds_shape", weight.tensor.shape)),
        )
        for weight in _adapter_weights(engine, scaled=True)
    }


def gathered_adapters(engine: Any, *, scaled: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the factors of all adapters, A and B of each layer, under the layers' names in the model's folder.

    At stage 3 this is a collective call, see `gathered_weights`.

    Args:
        scaled: whether B is multiplied with the adapters' scale.
    """
    yield from _gathered(engine, _adapter_weights(engine, scaled=scaled))


def _adapter_weights(engine: Any, *, scaled: bool) -> list[_Weight]:
    found = []
    for name, adapter in adapters(engine.module.lm).items():
        layer = published_name(name).removesuffix(WEIGHT)
        found.append(_Weight(layer + ADAPTER_DOWN, adapter.down))
        found.append(_Weight(layer + ADAPTER_UP, adapter.up, factor=adapter.scale if scaled else 1.0))
    return found


def trained_weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield what training changes, on its device, under its names in the module: the adapters, or else all weights.

    At stage 3 this is a collective call, see `gathered_weights`.
    """
    lm = engine.module.lm
    if adapters(lm):
        trained = [_Weight(name, p) for name, p in lm.named_parameters() if p.requires_grad]
    else:
        trained = _model_weights(engine)
    yield from _gathered(engine, trained)


def _gathered(engine: Any, weights: list[_Weight]) -> Iterator[tuple[str, Tensor]]:
    if engine.zero_optimization_stage() < 3:
        for weight in weights:
            yield weight.name, weight.merged()
        return
    import deepspeed

    for bucket in _buckets(weights):
        sharded = [part for weight in bucket for part in weight.parts if hasattr(part, "ds_id")]
        with deepspeed.zero.GatheredParameters(sharded):
            for weight in bucket:
                yield weight.name, weight.merged()


def _model_weights(engine: Any) -> list[_Weight]:
    """Return the weights of the model without adapters, each with its adapter if it has one."""
    lm = engine.module.lm
    persistent = lm.state_dict(keep_vars=True).keys()
    buffers = [(name, buffer) for name, buffer in lm.named_buffers() if name in persistent]
    by_name = adapters(lm)
    own = {id(part) for adapter in by_name.values() for part in (adapter.down, adapter.up)}
    return [
        _Weight(published_name(name), tensor, by_name.get(name))
        for name, tensor in [*lm.named_parameters(), *buffers]
        if id(tensor) not in own
    ]


def _buckets(weights: list[_Weight]) -> Iterator[list[_Weight]]:
    bucket: list[_Weight] = []
    size = 0
    for weight in weights:
        if bucket and size + weight.nbytes > GATHER_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += weight.nbytes
    if bucket:
        yield bucket


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

    adapters: bool = False
    """True if the adapters are gathered, and nothing else."""


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

    def send_gather(self, *, adapters: bool = False) -> None:
        """Let them take part in gathering full parameters, or the adapters alone."""
        if self._count:
            _send(GatherWeights(adapters))

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
