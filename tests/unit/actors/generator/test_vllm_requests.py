"""The engine asks vLLM for what a request wants, and for no more."""

import sys
from types import SimpleNamespace

import pytest

from actors.generator.engine import Request
from actors.generator.vllm_engine.engine import SchedulerGauges, VllmEngine


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
