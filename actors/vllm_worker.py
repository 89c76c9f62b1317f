"""Import path of Offbeat's worker extension for vLLM servers that others run: `actors.vllm_worker.WeightWorker`."""

from actors.generator.vllm_worker import WeightWorker

__all__ = ["WeightWorker"]
