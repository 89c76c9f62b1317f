"""Runs inside vLLM's worker process: takes weights from a file, and dies with its parent.

vLLM imports this module because the engine's ``worker_extension_cls`` names a class in it, before the model
is loaded; that is where a weight-transfer backend has to be registered. The same two settings make a stock
vLLM server updatable: ``--worker-extension-cls actors.vllm_worker.WeightWorker
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

from actors.generator.weights.staging import FILE_FORMAT, shares
from actors.generator.weights.tensor_file import tensors_in
from protocol.orphans import die_with_parent

BACKEND = "offbeat_file"
KEPT_BYTES = int(os.environ.get("OFFBEAT_KEPT_WEIGHTS_MB", "1024")) << 20
"""Of a CPU model, see `keep_cpu_weights`."""

THREADS = min(4, len(os.sched_getaffinity(0)))
"""That write weights in place, at most."""
BYTES_OF_A_THREAD = 16 * 2**20
"""For less another thread takes longer to come than it saves."""


@dataclass
class FileInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The form of the updates that will come; a server with another backend refuses the word."""

    format: str = FILE_FORMAT


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A file and its tensors: rows of (name, safetensors dtype, shape, offset, nbytes)."""

    path: str = ""
    tensors: list[Any] = field(default_factory=list)


class FileWeights(WeightTransferEngine[FileInit, FileUpdate]):  # type: ignore[misc]
    """Loads verified tensors from a local file: in place where that is all, else through vLLM's layerwise reload.

    The file is mapped, so every worker of a host shares one copy; `load_weights` moves the tensors to the
    device and casts them. A failure leaves the model half replaced: the caller must not sample from it again.
    """

    init_info_cls = FileInit
    update_info_cls = FileUpdate
    _in_place = False
    _mapped: torch.Tensor | None = None
    _threads = 1

    def init_transfer_engine(self, init_info: FileInit) -> None:
        if init_info.format != FILE_FORMAT:
            raise ValueError(f"updates of form {init_info.format!r} were announced, this is {FILE_FORMAT!r}")

    def start_weight_update(self) -> None:
        self._in_place = self.device.type == "cpu" and may_be_written(self.model)
        if not self._in_place:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        size = os.path.getsize(update_info.path)
        data = torch.from_file(update_info.path, shared=False, size=size, dtype=torch.uint8)

        def load(rows: list[Any]) -> None:
            self.model.load_weights(tensors_in(data, rows))

        if self._in_place:
            self._mapped, self._threads = data, min(THREADS, 1 + size // BYTES_OF_A_THREAD)
            # vLLM passes over a tied weight's second name only beside the first.
            tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
            together = self.model_config.get_vocab_size() if tied else None
            parts = shares(update_info.tensors, self._threads, together=together)
            in_threads([partial(load, rows) for rows in parts], self._threads)
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
        """Nothing is held."""


def may_be_written(model: torch.nn.Module) -> bool:
    """Whether a CPU model has all its weights as they were loaded, and nothing is made of them but packed copies."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
            if module.weight.ndim != 2 or not module.weight.numel():  # let go of, or packed where it lies
                return False
        elif method is not None or (
            hasattr(module, "process_weights_after_loading") and not isinstance(module, Attention)
        ):
            return False
    return True


def packers(model: torch.nn.Module) -> list[Callable[[], object]]:
    """What makes the packed copies anew from which the CPU backend computes."""
    modules: Iterator[Any] = model.modules()
    return [
        partial(module.quant_method.process_weights_after_loading, module)
        for module in modules
        if hasattr(module, "cpu_linear")
    ]


def in_threads(work: list[Callable[[], object]], count: int) -> None:
    """All of it. Nothing is sampled meanwhile, so at least one core of this host is free for it."""
    if count == 1:
        for part in work:
            part()
        return
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(part) for part in work]:
            done.result()


def repack_tied(model: torch.nn.Module) -> None:
    """Pack tied weights again, which vLLM's reload on CPU forgets.

    The CPU backend computes a Linear from a packed copy of its weight. A module whose weight belongs to
    another one (lm_head to the embedding) is not reloaded itself and would go on with the previous version.
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
    """Keep the weights of CPU models up to `KEPT_BYTES` beside their packed copies: updates are written into them.

    vLLM lets go of a Linear's weight once it is packed, and its reload has to make all layers anew.
    """
    dispatch = utils.dispatch_cpu_unquantized_gemm
    kept: dict[Any, int] | None = {}

    def dispatch_and_keep(layer: Any, remove_weight: bool) -> None:
        nonlocal kept
        if remove_weight and kept is not None:
            kept[layer] = layer.weight.nbytes
            if sum(kept.values()) > KEPT_BYTES:  # too large a model: as vLLM has it, for all layers
                for other in kept.keys() - {layer}:
                    other.weight = torch.nn.Parameter(other.weight.new_empty(0), requires_grad=False)
                kept = None
        dispatch(layer, remove_weight and kept is None)

    utils.dispatch_cpu_unquantized_gemm = dispatch_and_keep


def spare_cpu_generators() -> None:
    """Keep seeded requests from killing the engine on CPU.

    When vLLM throws away a token that it sampled in the middle of a prompt (as after an update that recomputes
    running requests), it turns the request's random generator back. A CPU generator cannot be turned back and
    raises. It is left where it is: the random numbers go on, the probabilities are right all the same.
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


class WeightWorker:
    """Mixed into vLLM's worker class."""

    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def load_version(self, update_info: dict[str, Any]) -> None:
        """An update's three steps in one call of the engine: each call takes a millisecond of the pause."""
        self.start_weight_update()
        self.update_weights(update_info)
        self.finish_weight_update()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeights)
    spare_cpu_generators()
    keep_cpu_weights()
die_with_parent()
