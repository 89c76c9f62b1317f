"""vLLM is asked for no more than a request wants; its gauges are means and counts; a cancelled load loses it."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.generator.engine import Request
from actors.generator.http_engine import HttpEngine
from actors.generator.vllm_engine.engine import SchedulerGauges, VllmEngine, why_crowded
from protocol.weights.format import Manifest


@pytest.mark.parametrize(("wanted", "start"), [(None, 5), (0, 0), (3, 3), (5, 5)])
def test_vllm_returns_no_experts_of_a_prompt_that_nobody_wants(monkeypatch, wanted, start):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    engine = VllmEngine(SimpleNamespace(), "recomputed", 8, SchedulerGauges())
    request = Request(
        "r",
        [7] * 5,
        max_tokens=1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=None,
        stop=[],
        routes_from=wanted,
    )
    assert engine._sampling(request)["routed_experts_prompt_start"] == start


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


MANIFEST = Manifest(run="r", epoch=0, version=1, nbytes=0, tensors=[], root="", chunk_bytes=1, chunks=b"")


async def never(*_, **__):
    await asyncio.Event().wait()


def vllm_engine(monkeypatch):
    base = SimpleNamespace(WeightTransferUpdateRequest=dict)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    return VllmEngine(
        SimpleNamespace(
            engine_core=SimpleNamespace(pause_scheduler_async=never),
            errored=False,
            vllm_config=SimpleNamespace(device_config=SimpleNamespace(device_type="cpu")),
        ),
        "recomputed",
        8,
        SchedulerGauges(),
    )


def http_engine(monkeypatch):
    # Make the engine without `connect`, which needs a server.
    engine = HttpEngine.__new__(HttpEngine)
    engine.kv, engine.frozen, engine._failed, engine._streams = "recomputed", "", "", {}
    engine._open = asyncio.Event()
    monkeypatch.setattr(engine, "_post", never)
    return engine


@pytest.mark.parametrize("make", [vllm_engine, http_engine])
def test_a_cancelled_load_is_a_cancellation_and_the_engine_is_lost(make, monkeypatch):
    async def main():
        engine = make(monkeypatch)
        load = asyncio.create_task(engine.apply_weights(MANIFEST, Path("data")))
        await asyncio.sleep(0)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert "weight update: CancelledError" in engine.health()

    asyncio.run(main())
