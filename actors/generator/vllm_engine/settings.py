"""How vLLM is set up: its environment variables, the arguments of its engine, and the prompts that warm it up.

`prepare_environment` must run before anything imports torch or vllm. This module imports them only inside
functions, so any code can import it.
"""

import os
from typing import Any

from actors.config import GeneratorConfig
from actors.generator.vllm_engine.plugin import PARENT

BACKEND = "offbeat_file"
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
    if cpu:
        arguments["kv_cache_memory_bytes"] = config.kv_cache_mb << 20
        # vLLM wants at least one token for each running request.
        arguments["max_num_batched_tokens"] = max(CPU_STEP_TOKENS, config.max_num_seqs)
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization_used
        arguments["enable_sleep_mode"] = config.sleep_in_updates is True
    return {name: value for name, value in arguments.items() if value is not None}


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
