"""Test the gauges of vLLM's scheduler: means over steps, and a running count."""

from types import SimpleNamespace

import pytest

from actors.generator.vllm_engine.engine import SchedulerGauges, why_crowded


def step(usage, waiting, *, queries=0, hits=0, preempted=0):
    prefix = SimpleNamespace(queries=queries, hits=hits, preempted_requests=preempted)
    return SimpleNamespace(kv_cache_usage=usage, num_waiting_reqs=waiting, prefix_cache_stats=prefix)


def test_means_since_they_were_last_taken():
    gauges = SchedulerGauges()
    gauges.record(step(0.2, 0, queries=100, hits=0))
    gauges.record(step(0.6, 4, queries=100, hits=96, preempted=3))
    assert gauges.take() == pytest.approx(
        {"kv_cache_share": 0.4, "waiting_requests": 2.0, "prefix_hit_share": 0.48, "recomputed_total": 3.0}
    )
    gauges.record(step(0.5, 1, preempted=2))
    assert gauges.take() == pytest.approx(
        {"kv_cache_share": 0.5, "waiting_requests": 1.0, "prefix_hit_share": 0.0, "recomputed_total": 5.0}
    )


def test_nothing_happened():
    nothing = {
        "kv_cache_share": 0.0,
        "waiting_requests": 0.0,
        "prefix_hit_share": 0.0,
        "recomputed_total": 0.0,
    }
    assert SchedulerGauges().take() == nothing


def test_a_model_without_a_prefix_cache():
    gauges = SchedulerGauges()
    gauges.record(SimpleNamespace(kv_cache_usage=0.5, num_waiting_reqs=0, prefix_cache_stats=None))
    assert gauges.take()["prefix_hit_share"] == 0.0


@pytest.mark.parametrize(
    ("share", "waiting", "said"), [(0.95, 3, True), (0.95, 0, False), (0.5, 3, False), (0.9, 1, True)]
)
def test_advice_only_where_the_cache_is_full_and_somebody_waits(share, waiting, said):
    advice = why_crowded({"kv_cache_share": share, "waiting_requests": float(waiting)})
    assert bool(advice) is said
    assert not said or f"({100 * share:.0f} %), and {waiting} requests" in advice
