"""Code inside vLLM's worker process: takes weights from a file, and dies with its parent.

vLLM imports this module before it loads the model, because the engine's ``worker_extension_cls`` names a
class in it. A weight-transfer backend has to be registered by then. Two settings let a stock vLLM server take
updates too: ``--worker-extension-cls actors.vllm_worker.WeightWorker
--weight-transfer-config '{"backend": "offbeat_file"}'`` (with this package on its PYTHONPATH).
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from actors.generator.vllm_engine.routes import record_on_cpu
from actors.generator.weights.staging import ADAPTER_NUMBER, FILE_FORMAT, shares
from actors.generator.weights.tensors import DeviceReader, FileAhead, file_bytes, free_bytes, tensors_in
from protocol.processes import die_with_parent

BACKEND = "offbeat_file"
KEPT_BYTES = int(os.environ.get("OFFBEAT_KEPT_WEIGHTS_MB", "1024")) << 20
"""Upper limit of the bytes of weights that `keep_cpu_weights` keeps for a CPU model."""

THREADS = min(4, len(os.sched_getaffinity(0)))
"""Upper limit of the threads that write weights in place."""
BYTES_OF_A_THREAD = 16 * 2**20
"""Bytes of weights for each further thread. For less, a thread takes longer to start than it saves."""

FILE_AHEAD = FileAhead()
"""The file of the version that this process will load next."""


@dataclass
class FileInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Format of the updates that will come. A server with a different backend refuses this message."""

    format: str = FILE_FORMAT


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Path of a file, and its tensors as rows of (name, safetensors dtype, shape, offset, nbytes)."""

    path: str = ""
    tensors: list[Any] = field(default_factory=list)


class FileWeights(WeightTransferEngine[FileInit, FileUpdate]):  # type: ignore[misc]
    """Loads verified tensors from a file: in place if `may_be_written`, else by vLLM's layerwise reload.

    The file is mapped, so all workers of a host share one copy. On a GPU a `DeviceReader` brings the tensors to the
    device, and `load_weights` takes the worker's part there; else `load_weights` takes it from the file. Both cast. A
    failure leaves the model half replaced, so the caller must not sample from it again.
    """

    init_info_cls = FileInit
    update_info_cls = FileUpdate
    _in_place = False
    _mapped: torch.Tensor | None = None
    _threads = 1
    _reader: DeviceReader | None = None

    def init_transfer_engine(self, init_info: FileInit) -> None:
        if init_info.format != FILE_FORMAT:
            raise ValueError(f"updates of form {init_info.format!r} were announced, this is {FILE_FORMAT!r}")

    def start_weight_update(self) -> None:
        self._in_place = self.device.type == "cpu" and may_be_written(self.model)
        if not self._in_place:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        on_gpu = self.device.type == "cuda"
        data = FILE_AHEAD.take(update_info.path) if on_gpu else file_bytes(update_info.path)

        def load(rows: list[Any]) -> None:
            self.model.load_weights(tensors_in(data, rows))

        if self._in_place:
            self._mapped, self._threads = data, min(THREADS, 1 + data.nbytes // BYTES_OF_A_THREAD)
            # vLLM skips the second name of a tied weight only if the same call loads the first name too.
            tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
            together = self.model_config.get_vocab_size() if tied else None
            parts = shares(update_info.tensors, self._threads, together=together)
            in_threads([partial(load, rows) for rows in parts], self._threads)
        elif on_gpu:
            self._reader = self._reader or DeviceReader(self.device)
            room = free_bytes(self.device)
            self.model.load_weights(self._reader.tensors(data, update_info.tensors, room))
        else:
            load(update_info.tensors)

    def finish_weight_update(self) -> None:
        if self._in_place:
            in_threads([self._unmap, *packers(self.model)], self._threads)
            return
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied(self.model)

    def _unmap(self) -> None:
        self._mapped = None

    def shutdown(self) -> None:
        """Do nothing, because this engine holds no resources."""


def may_be_written(model: torch.nn.Module) -> bool:
    """Return whether updates may be written into a CPU model's weights in place.

    Every weight must still be there as it was loaded, and nothing but packed copies may be derived from it.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
            # vLLM has released this weight, or packed it in place.
            if module.weight.ndim != 2 or not module.weight.numel():
                return False
        elif method is not None or (
            hasattr(module, "process_weights_after_loading") and not isinstance(module, Attention)
        ):
            return False
    return True


def packers(model: torch.nn.Module) -> list[Callable[[], object]]:
    """Return the calls that rebuild the packed copies from which the CPU backend computes."""
    modules: Iterator[Any] = model.modules()
    return [
        partial(module.quant_method.process_weights_after_loading, module)
        for module in modules
        if hasattr(module, "cpu_linear")
    ]


def in_threads(work: list[Callable[[], object]], count: int) -> None:
    """Run all of the work in up to ``count`` threads, and wait for it.

    Nothing is sampled meanwhile, so at least one core of this host is free.
    """
    if count == 1:
        for part in work:
            part()
        return
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(part) for part in work]:
            done.result()


def repack_tied(model: torch.nn.Module) -> None:
    """Pack tied weights again, because vLLM's reload on CPU does not.

    The CPU backend computes a Linear from a packed copy of its weight. vLLM does not reload a module that
    shares the weight of a different one (lm_head and the embedding), so it would still compute from the
    previous version.
    """
    owners: dict[int, list[Any]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.numel():
            owners.setdefault(weight.data_ptr(), []).append(module)
    for modules in owners.values():
        for module in modules if len(modules) > 1 else ():
            if hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)


def keep_cpu_weights() -> None:
    """Make vLLM keep a CPU model's weights beside their packed copies, for updates in place.

    By default vLLM releases a Linear's weight once it is packed, and its reload has to build all layers anew.
    A model whose weights take more than `KEPT_BYTES` keeps this default.
    """
    dispatch = utils.dispatch_cpu_unquantized_gemm
    kept: dict[Any, int] | None = {}

    def dispatch_and_keep(layer: Any, remove_weight: bool) -> None:
        nonlocal kept
        if remove_weight and kept is not None:
            kept[layer] = layer.weight.nbytes
            # The model is too large: release the weights of all layers, as vLLM does by default.
            if sum(kept.values()) > KEPT_BYTES:
                for other in kept.keys() - {layer}:
                    other.weight = torch.nn.Parameter(other.weight.new_empty(0), requires_grad=False)
                kept = None
        dispatch(layer, remove_weight and kept is None)

    utils.dispatch_cpu_unquantized_gemm = dispatch_and_keep


def pack_cpu_experts_again() -> None:
    """Make vLLM pack the experts of a CPU model again after its reload.

    The CPU backend computes a mixture of experts from packed weights. vLLM packs them when it loads the model, but its
    reload leaves them as they are in the file, so the engine would sample from numbers that mean nothing.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    experts = method.UnquantizedFusedMoEMethod
    set_up = experts._setup_kernel

    def set_up_and_pack(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        reloaded = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if reloaded and self.unquantized_backend == method.UnquantizedMoeBackend.CPU:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    experts._setup_kernel = set_up_and_pack


def spare_cpu_generators() -> None:
    """Keep seeded requests from stopping the engine on CPU.

    vLLM drops a token that it sampled in the middle of a prompt, for example after an update that recomputes
    running requests. It then rewinds the request's random generator. A CPU generator cannot be rewound and
    raises, so this patch leaves it where it is. The random numbers go on, and the probabilities stay right.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    bookkeeping = GPUModelRunner._bookkeeping_sync

    def without_turning_back(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.device.type != "cpu":
            return bookkeeping(self, *arguments, **named)
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return bookkeeping(self, *arguments, **named)
        finally:
            self.input_batch.generators = generators

    GPUModelRunner._bookkeeping_sync = without_turning_back


def put_adapter(manager: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Put an adapter into vLLM's, in place of the one that requests use.

    vLLM copies it into tensors that it has made for adapters, so a step that is compiled or captured computes with it.

    Args:
        manager: vLLM's ``lora_manager`` of a worker.
        tensors: the factors of layers, see `protocol.weights.format.adapter_shapes`. Layers without any compute with
            their weight alone. Without any at all, the adapter is one of vLLM's own, which is zero.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    own = manager._adapter_manager
    rank = min((min(tensor.shape) for tensor in tensors.values()), default=1)
    mapper = getattr(own.model, "hf_to_vllm_mapper", None)
    if not tensors:
        own.add_adapter(own.create_dummy_lora(ADAPTER_NUMBER, rank, manager.embedding_modules))
        own.activate_adapter(ADAPTER_NUMBER)
        return
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_NUMBER,
        # vLLM knows the names that PEFT writes. The scale is in B already.
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()},
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        skip_prefixes=getattr(own.model, "lora_skip_prefixes", None),
    )
    wanted = set(adapter.loras)
    own.remove_adapter(ADAPTER_NUMBER)
    own.add_adapter(adapter)
    own.activate_adapter(ADAPTER_NUMBER)
    if unknown := sorted(wanted - known_to_vllm(own)):
        raise ValueError(f"vLLM has no adapter for {unknown[0]} ({len(unknown)} layers)")


def known_to_vllm(own: Any) -> set[str]:
    """Return the names of layers that can have an adapter: those of parts that vLLM computes as one, too."""
    names = set(own.modules)
    for name in own.modules:
        parent, _, last = name.rpartition(".")
        names |= {f"{parent}.{part}" for part in own.packed_modules_mapping.get(last, ())}
    return names


class WeightWorker:
    """Extension that vLLM mixes into its worker class."""

    model_runner: Any
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def map_ahead(self, path: str) -> None:
        """Begin to map a file that will be loaded, see `actors.generator.weights.tensors`."""
        FILE_AHEAD.begin(path)

    def is_mapped(self) -> bool:
        """Return whether the file is mapped."""
        return FILE_AHEAD.ready

    def load_adapter(self, update_info: dict[str, Any]) -> None:
        """Replace the adapter by that of a version. The path "" stands for one that changes nothing."""
        rows, path = update_info["tensors"], update_info["path"]
        put_adapter(self.model_runner.lora_manager, dict(tensors_in(file_bytes(path), rows)) if path else {})

    def load_version(self, update_info: dict[str, Any]) -> None:
        """Run an update's three steps in one call of the engine, because each call adds 1 ms to the pause."""
        self.start_weight_update()
        self.update_weights(update_info)
        self.finish_weight_update()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeights)
    spare_cpu_generators()
    keep_cpu_weights()
    pack_cpu_experts_again()
    record_on_cpu()
die_with_parent()
