"""Sums the statistics of vLLM's scheduler over steps, as gauges of a generator."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
