"""Import path of `actors.vllm_worker.WeightWorker`, the worker extension for vLLM servers run by others."""

from actors.generator.vllm_engine.worker import WeightWorker

__all__ = ["WeightWorker"]
