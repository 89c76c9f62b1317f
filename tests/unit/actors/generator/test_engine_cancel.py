"""A cancelled weight load ends as a cancellation, and its engine then reports that it is lost."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.generator.http_engine import HttpEngine
from actors.generator.vllm_engine.engine import SchedulerGauges, VllmEngine
from protocol.weights.format import Manifest

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
