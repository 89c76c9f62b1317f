"""Engine on vLLM inside the generator: AsyncLLM runs in this process, vLLM's engine in one child process."""

import asyncio
import contextlib
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from actors.config import GeneratorConfig
from actors.errors import EngineFailed, ModelNotLoaded, RequestRefused
from actors.generator.engine import Request, VersionedEngine
from actors.generator.requests import stamp
from actors.generator.vllm_engine.one_process import in_this_process
from actors.generator.vllm_engine.plugin import PARENT, is_registered, prepare_forks
from actors.generator.vllm_engine.routes import RouteReader, allow_on_cpu
from actors.generator.vllm_engine.socket_folder import make_socket_folder
from actors.generator.weights.staging import ADAPTER, ADAPTER_NUMBER, tensor_table
from actors.sampled import FinishReason, Routes, Sampled, nothing
from protocol.errors import GpuUnusable
from protocol.messages.fields import KvPolicy
from protocol.weights.format import Manifest

log = logging.getLogger(__name__)


class Platform(Protocol):
    """The part of vLLM's `current_platform` that is asked."""

    device_type: str

    def device_count(self) -> int:
        """Return the number of GPUs that vLLM sees."""
        ...


def check_platform(config: GeneratorConfig, platform: Platform) -> None:
    """Make sure that vLLM computes on GPUs if the generator was given some.

    vLLM takes the CPU, or nothing, where it finds no driver, or was built for the CPU.

    Raises:
        GpuUnusable: it does not; the generator must not compute on a CPU instead.
    """
    if not config.devices:
        return
    given = f"the generators were given GPUs ({', '.join(map(str, config.devices))})"
    cure = (
        'look at nvidia-smi, and install offbeat with the extra "gpu" into a virtual environment of its own'
    )
    if platform.device_type != "cuda":
        found = platform.device_type or "no device"
        raise GpuUnusable(f"{given}, but vLLM finds {found} to compute on; {cure}")
    if (count := platform.device_count()) < config.tensor_parallel_size:
        raise GpuUnusable(
            f"{given}, but vLLM sees {count} for this one, and generator.tensor_parallel_size is "
            f"{config.tensor_parallel_size}; {cure}"
        )


BACKEND = "offbeat_file"
SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable with the folder of vLLM's sockets."""
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""Variable that says how vLLM starts its processes: "fork", its default where there is a GPU, or "spawn"."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room; a smaller one fits in."""
WORKER_EXTENSION = "actors.generator.vllm_engine.worker.WeightWorker"
# With vLLM's default of 128, short prompts get no prefix caching at all.
CPU_BLOCK_SIZE = 32
CPU_STEP_TOKENS = 512
"""Most tokens of one step on a CPU. A step cannot be interrupted: new weights, and the first token of a request
that comes during it, wait for its end. For a model of 135 million parameters such a step takes some seconds."""


def prepare_environment(config: GeneratorConfig) -> None:
    """Set environment variables that vLLM and torch read at import. A value that the user has set wins."""
    settings = {
        # One child process instead of two.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Do not bind threads to cores, because several roles share them.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": str(config.threads_used),
    }
    if config.enforce_eager_used:
        # Without this the first request would still call a C++ compiler.
        settings["TORCHDYNAMO_DISABLE"] = "1"
    if SOCKETS not in os.environ and (folder := make_socket_folder()) is not None:
        settings[SOCKETS] = str(folder)
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    os.environ[PARENT] = str(os.getpid())


def import_vllm() -> Any:
    """Return the vllm module.

    Raises:
        RuntimeError: vLLM cannot be imported. The message says how to repair the installation.
    """
    try:
        import vllm
    except ImportError as error:
        raise RuntimeError(
            f'vLLM cannot be imported ({error}); install offbeat with the extra "cpu" or "gpu"'
        ) from error
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        raise RuntimeError(
            "vLLM cannot be imported: torchvision is built for CUDA, torch for the CPU (torchvision::nms is "
            "missing). Run: pip uninstall -y torchvision torchaudio torchcodec; or install all three from "
            "PyTorch's CPU wheel index."
        ) from error
    return vllm


def engine_arguments(config: GeneratorConfig, *, model: str, seed: int, cpu: bool) -> dict[str, Any]:
    """Return the arguments for AsyncEngineArgs."""
    arguments: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": config.dtype_used,
        "seed": seed,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": config.enforce_eager_used,
        "block_size": config.block_size or (CPU_BLOCK_SIZE if cpu else None),
        "enable_prefix_caching": True,
        # Sampling parameters come from the request, not from the model folder.
        "generation_config": "vllm",
        # Log-probabilities under the distribution sampled from. vLLM's default is the raw distribution.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "enable_return_routed_experts": config.routes,
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
    }
    if config.adapter_rank:
        rank = next(rank for rank in RANKS if rank >= config.adapter_rank)
        arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "max_cpu_loras": 1}
    if cpu:
        arguments["kv_cache_memory_bytes"] = config.kv_cache_mb << 20
        # vLLM wants at least one token for each running request.
        arguments["max_num_batched_tokens"] = max(CPU_STEP_TOKENS, config.max_num_seqs)
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization_used
        arguments["enable_sleep_mode"] = config.sleep_in_updates is True
    return {name: value for name, value in arguments.items() if value is not None}


def described_to_vllm(vllm: Any, arguments: Mapping[str, Any]) -> Any:
    """Return vLLM's configuration of an engine, which it makes from the model's description, without the weights.

    Args:
        vllm: the module.
        arguments: for AsyncEngineArgs.

    Raises:
        ModelNotLoaded: it cannot be made: vLLM does not know the architecture, or lacks a package that the model needs.
    """
    try:
        described = vllm.AsyncEngineArgs(**arguments).create_engine_config()
    except (ImportError, ValueError, KeyError, AttributeError, NotImplementedError) as error:
        # vLLM goes on with the names of all architectures that it knows.
        told = " ".join(str(error).split()).partition(". Supported architectures")[0][:TOLD_CHARS]
        raise ModelNotLoaded(
            f"vLLM cannot load the model {arguments['model']}: {told}; take a model that this vLLM knows, or install "
            'what is missing. With generator.backend = "http" another server may sample'
        ) from error
    if arguments.get("enable_lora"):
        from vllm.model_executor.models import supports_lora

        model = described.model_config
        kind, _ = model.registry.resolve_model_cls(model.architectures, model)
        if not supports_lora(kind):
            raise ModelNotLoaded(
                f"vLLM has no adapters for the model {arguments['model']} ({kind.__name__}); set "
                'learner.lora.publish to "merged"'
            )
    return described


def warm_up_prompts(tokens: int, config: GeneratorConfig, vocab_size: int) -> list[list[list[int]]]:
    """Return two batches of prompts, each with as many tokens as one step computes, as far as requests allow.

    All prompts differ from their first token on, so that no one finds another's keys and values in the cache.

    Example:
        >>> first, second = warm_up_prompts(512, GeneratorConfig(max_model_len=101), vocab_size=50)
        >>> [len(prompt) for prompt in first], first[0][:3], second[0][:3]
        ([100, 100, 100, 100, 100], [0, 1, 2], [5, 6, 7])
    """
    length = min(tokens, config.max_model_len - 1)
    count = max(1, min(config.max_num_seqs, tokens // length))
    return [
        [[(turn * count + i + j) % vocab_size for j in range(length)] for i in range(count)]
        for turn in range(2)
    ]


TOLD_CHARS = 600
"""Characters that are kept of vLLM's own words."""
FULL_SHARE = 0.9


@dataclass
class SchedulerGauges:
    """Sums over the engine's steps since `take` was last called.

    Two counts are never reset: ``steps_total``, and ``recomputed``, the requests that were computed again from
    their beginning, because their keys and values were dropped for new weights or for lack of room.
    """

    steps_total: int = 0
    steps: int = 0
    kv_cache: float = 0.0
    waiting: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed: int = 0

    def record(self, stats: Any) -> None:
        """Add the statistics of one step.

        Args:
            stats: vLLM's ``SchedulerStats``.
        """
        self.steps_total += 1
        self.steps += 1
        self.kv_cache += stats.kv_cache_usage
        self.waiting += stats.num_waiting_reqs
        if (prefix := stats.prefix_cache_stats) is not None:
            self.prompt_tokens += prefix.queries
            self.cached_tokens += prefix.hits
            self.recomputed += prefix.preempted_requests

    def take(self) -> dict[str, float]:
        """Return the gauges since the last call, and start the sums anew.

        They are the mean share of the KV cache in use, the mean number of requests that wait for a place in
        the engine, the share of new prompts' tokens whose keys and values were cached, and the total of
        ``recomputed``.
        """
        steps = max(1, self.steps)
        gauges = {
            "kv_cache_share": self.kv_cache / steps,
            "waiting_requests": self.waiting / steps,
            "prefix_hit_share": self.cached_tokens / max(1, self.prompt_tokens),
            "recomputed_total": float(self.recomputed),
        }
        self.steps = self.prompt_tokens = self.cached_tokens = 0
        self.kv_cache = self.waiting = 0.0
        return gauges


def why_crowded(gauges: Mapping[str, float]) -> str:
    """Return advice if requests wait because the KV cache is full, else "".

    >>> why_crowded({"kv_cache_share": 0.97, "waiting_requests": 12.0})[:52]
    'the KV cache is full (97 %), and 12 requests wait fo'
    >>> why_crowded({"kv_cache_share": 0.5, "waiting_requests": 12.0})
    ''
    """
    if gauges["kv_cache_share"] < FULL_SHARE or gauges["waiting_requests"] < 1:
        return ""
    return (
        f"the KV cache is full ({100 * gauges['kv_cache_share']:.0f} %), and {gauges['waiting_requests']:.0f} requests "
        "wait for room; those that run may have to be computed again. Give it more (generator.kv_cache_mb on a "
        "CPU, generator.gpu_memory_utilization on a GPU), or lower generator.max_num_seqs"
    )


def stat_logger(gauges: SchedulerGauges) -> type:
    """Return a class for ``stat_loggers`` of AsyncLLM that records into ``gauges`` and does nothing else.

    It derives from vLLM's Prometheus logger. Otherwise vLLM would add that logger, which costs far more.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class StatsRecorder(PrometheusStatLogger):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            if scheduler_stats is not None:
                gauges.record(scheduler_stats)

        def log_engine_initialized(self) -> None:
            pass

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

    return StatsRecorder


POLL_S = 0.02
"""Time between two questions to the workers."""


async def map_ahead(llm: Any, data: Path) -> None:
    """Let all workers map a file, and wait until they have, while the engine goes on. Without a GPU do nothing.

    On a CPU a call of the workers would wait for the step that runs, which may take seconds.

    Args:
        llm: vLLM's AsyncLLM, whose workers are of `actors.generator.vllm_engine.worker.WeightWorker`.
    """
    if llm.vllm_config.device_config.device_type != "cuda":
        return
    await llm.collective_rpc("map_ahead", args=(str(data),))
    while not all(await llm.collective_rpc("is_mapped")):  # noqa: ASYNC110  # the workers are other processes
        await asyncio.sleep(POLL_S)


# After this time the engine process is killed. It holds nothing worth waiting for.
CLOSE_TIMEOUT_S = 1.0


class VllmEngine(VersionedEngine):
    """`actors.generator.engine.SamplingEngine` on an AsyncLLM.

    With kv = "recomputed" an update drops all cached keys and values, and running requests are computed again
    under the new weights. With "kept" running requests go on with their cached keys and values. A cache salt
    per version then keeps requests that start later from reading entries of earlier weights.

    With ``config.adapter_rank`` a version is an adapter (LoRA). All requests name the same one, and an update replaces
    it while they are paused, so that running ones go on with the new version as with whole weights.
    """

    frozen = ""

    def __init__(self, llm: Any, kv: KvPolicy, stream_interval: int, stats: SchedulerGauges) -> None:
        super().__init__()
        self.kv = kv
        self.full_step_s = 0.0
        self._llm = llm
        self._stats = stats
        self._interval = stream_interval
        self._adapter: Any = None
        self._advised = False

    @classmethod
    async def start(
        cls, config: GeneratorConfig, *, model: str, seed: int, one_process: bool = False
    ) -> "VllmEngine":
        """Load the model folder as version 0, and measure how long the largest step takes.

        Runs in the caller's thread on purpose: the engine process dies with the thread that started it.

        Args:
            one_process: have vLLM's engine core in this process, too, which then stands while it makes a step.

        Raises:
            EngineFailed: the first steps took longer than ``config.warm_up_s``.
            GpuUnusable: the generator was given GPUs, but vLLM does not compute on them.
            ModelNotLoaded: vLLM has no way to load this model.
        """
        prepare_environment(config)
        if config.tensor_parallel_size > 1 and not is_registered():
            log.warning(
                "install Offbeat again: vLLM does not know its plugin, so a killed generator leaves its engine, and "
                "no experts are recorded on a CPU"
            )
        vllm = import_vllm()
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        check_platform(config, current_platform)
        cpu = current_platform.is_cpu()
        arguments = engine_arguments(config, model=model, seed=seed, cpu=cpu)
        arguments["weight_transfer_config"] = WeightTransferConfig(**arguments["weight_transfer_config"])
        if one_process:
            # A step that is prepared in advance would be computed with the weights of before.
            arguments["async_scheduling"] = False
        allow_on_cpu()
        stats = SchedulerGauges()
        method = os.environ.get(START_METHOD, "fork")
        described = described_to_vllm(vllm, arguments)
        if cpu and config.tensor_parallel_size == 1:
            # On a CPU vLLM asks for a new process, which imports everything a second time: half of the start. Its
            # workers would have to be new, and here the engine is the worker.
            os.environ[START_METHOD] = method
        if not one_process:
            prepare_forks()
        with in_this_process() if one_process else contextlib.nullcontext():
            llm = AsyncLLM.from_vllm_config(
                described,
                stat_loggers=[stat_logger(stats)],
                disable_log_stats=arguments["disable_log_stats"],
            )
        engine = cls(llm, config.kv_on_update_used, config.stream_interval, stats)
        # vLLM keeps this frame alive, but `close` has to drop the last reference.
        del llm
        await engine._llm.update_weight_version("0")
        if config.adapter_rank:
            await engine._begin_with_adapter()
        await engine._warm_up(config)
        return engine

    async def _begin_with_adapter(self) -> None:
        """Put an adapter that changes nothing beside the model, so that all requests have one from version 0 on.

        Raises:
            EngineFailed: vLLM cannot do this.
        """
        from vllm.lora.request import LoRARequest

        # The path is never read: the worker has the adapter of this number already, and replaces it itself.
        self._adapter = LoRARequest(ADAPTER, ADAPTER_NUMBER, ADAPTER)
        try:
            await self._llm.collective_rpc("load_adapter", args=({"path": "", "tensors": []},))
        except Exception as error:
            await self.close()
            raise EngineFailed(
                f"vLLM takes no adapter beside this model ({type(error).__name__}: {error}); set "
                'learner.lora.publish to "merged"'
            ) from None

    async def _warm_up(self, config: GeneratorConfig) -> None:
        """Make a few of the largest steps: the first may compile and allocate, the others are measured.

        Raises:
            EngineFailed: they took longer than ``config.warm_up_s``.
        """
        vllm_config = self._llm.vllm_config
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        prompts = warm_up_prompts(tokens, config, vllm_config.model_config.get_vocab_size())
        try:
            async with asyncio.timeout(config.warm_up_s):
                for turn, batch in enumerate(prompts):
                    began, before = time.monotonic(), self.steps
                    await asyncio.gather(
                        *(self._prefill(f"warm-up-{turn}-{i}", p) for i, p in enumerate(batch))
                    )
                    self.full_step_s = (time.monotonic() - began) / max(1, self.steps - before)
        except TimeoutError:
            await self.close()
            raise EngineFailed(
                f"the engine did not make its first steps of {tokens} tokens within generator.warm_up_s = "
                f"{config.warm_up_s:g} s; raise it if the model is that large"
            ) from None
        self._stats.take()
        log.info("a step of %d tokens takes %.2f s", tokens, self.full_step_s)

    async def _prefill(self, request_id: str, prompt: list[int]) -> None:
        request = Request(
            request_id, prompt, max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, seed=None, stop=[]
        )
        async for _ in self.generate(request):
            pass

    @property
    def steps(self) -> int:
        return self._stats.steps_total

    async def generate(self, request: Request) -> AsyncIterator[Sampled]:
        from vllm.exceptions import GracefulHTTPError, VLLMClientError

        await self._open.wait()
        sent, routes = 0, self._route_reader(request)
        seen: list[tuple[int, int]] = []
        try:
            prompt, sampling = self._prompt(request), self._sampling(request)
            async for output in self._llm.generate(prompt, sampling, request.id, lora_request=self._adapter):
                (answer,) = output.outputs
                if answer.weight_versions is not None:
                    starts = [(int(span.version), span.start) for span in answer.weight_versions]
                else:
                    starts = self._starts(request.id)
                count = len(answer.token_ids)
                if count and starts[: len(seen)] != seen:
                    raise EngineFailed(f"versions {seen} were told for tokens that have {starts}")
                seen = starts or seen
                finish_reason: FinishReason = answer.finish_reason or ""
                if not count:
                    yield nothing(finish_reason=finish_reason)
                    continue
                yield Sampled(
                    np.array(answer.token_ids, np.int32),
                    np.array(answer.logprobs.logprobs, np.float32),
                    stamp(starts, sent, sent + count),
                    finish_reason,
                    routes=None
                    if routes is None
                    else self._new_rows(routes, request.id, answer, sent + count),
                )
                sent += count
        except (VLLMClientError, GracefulHTTPError, ValueError) as error:
            raise RequestRefused(str(error)) from error
        except Exception as error:
            raise self._fail("generate", error) from error

    async def abort(self, request_id: str) -> None:
        await self._llm.abort(request_id)

    async def apply_weights(self, manifest: Manifest, data: Path) -> float:
        update = {"path": str(data), "tensors": tensor_table(manifest)}
        load = "load_version" if self._adapter is None else "load_adapter"
        with self._replacing_weights(manifest.version):
            if self._adapter is None:
                await map_ahead(self._llm, data)
            self._open.clear()
            # pause_generation would sleep 20 ms more, only so that outputs come before it returns. That is
            # not needed, because outputs here carry their versions. It would also clear the cache of images,
            # which are not used.
            await self._llm.engine_core.pause_scheduler_async(
                mode="keep", clear_cache=self.kv == "recomputed"
            )
            # The pause begins here: until now the step that was running has still produced tokens.
            began = time.perf_counter()
            await self._llm.collective_rpc(load, args=(update,))
            await self._llm.update_weight_version(str(manifest.version))
            await self._llm.resume_generation()
        return time.perf_counter() - began

    async def sleep(self) -> None:
        """Give the GPU's memory back: weights go to the host's, and the KV cache is dropped (vLLM's level 1).

        On a CPU only the KV cache is emptied, because vLLM cannot sleep there.
        """
        if self._llm.vllm_config.model_config.enable_sleep_mode:
            await self._llm.sleep(level=1, mode="keep")
        else:
            await self._llm.reset_prefix_cache()

    async def wake(self) -> None:
        """Take the memory again, and bring the weights back."""
        if self._llm.vllm_config.model_config.enable_sleep_mode:
            await self._llm.wake_up()

    def health(self) -> str:
        if not self._failed and self._llm.errored:
            self._failed = "the engine process has died"
        return self._failed

    def gauges(self) -> dict[str, float]:
        gauges = self._stats.take()
        if not self._advised and (advice := why_crowded(gauges)):
            self._advised = True
            log.warning("%s", advice)
        return gauges

    async def close(self) -> None:
        self._llm.shutdown(timeout=CLOSE_TIMEOUT_S)
        self._llm = None
        # Collect now, because AsyncLLM's finalizer prints errors when it runs during interpreter shutdown.
        gc.collect()

    def _prompt(self, request: Request) -> dict[str, Any]:
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": request.prompt}
        if self.kv == "kept":
            prompt["cache_salt"] = f"v{self._version}"
        return prompt

    def _sampling(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            # Only the tokens in stop_token_ids end an answer; the end tokens are among them.
            ignore_eos=True,
            stop_token_ids=request.stop,
            # 0 returns the log-probability of the sampled token alone.
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=self._interval,
            skip_clone=True,
            # Rows of the prompt cost time, so vLLM returns none where nobody wants them.
            routed_experts_prompt_start=len(request.prompt)
            if request.routes_from is None
            else request.routes_from,
        )

    def _route_reader(self, request: Request) -> RouteReader | None:
        if request.routes_from is None or not self._llm.vllm_config.aux_output_config.enabled:
            return None
        return RouteReader(request.routes_from, len(request.prompt))

    def _new_rows(self, reader: RouteReader, request_id: str, answer: Any, tokens: int) -> Routes | None:
        """Return the new rows of experts of a request, of which the actor has this number of sampled tokens."""
        if answer.routed_experts is not None:
            reader.add_last(answer.routed_experts)
        else:
            reader.add(self._state(request_id).routed_experts_chunks)
        return reader.take_new_rows(tokens)

    def _starts(self, request_id: str) -> list[tuple[int, int]]:
        return [(int(version), first) for version, first in self._state(request_id).weight_version_starts]

    def _state(self, request_id: str) -> Any:
        # vLLM publishes version spans and experts only with the last output, but records them at each step. Reading
        # that record gives exact versions for a chunk that spans an update.
        processor = self._llm.output_processor
        for internal in processor.external_req_ids.get(request_id, ()):
            return processor.request_states[internal]
        raise RuntimeError(f"vLLM has forgotten the running request {request_id}")
