"""The generator process: from its settings to the engine, the weights and the `Generator` that connects them."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import zmq

from actors.config import GeneratorConfig
from actors.generator.engine import SamplingEngine
from actors.generator.generator import Generator
from actors.generator.model_folder import read_model_facts
from actors.generator.sleeping import hold_together, sleeping
from actors.generator.weights.cache import Cache
from actors.generator.weights.cache_folder import cache_folder
from actors.generator.weights.relay import relay
from actors.generator.weights.staging import Stage, shared_memory
from protocol.gpu_lock import lock_of_environment
from protocol.security.addresses import check_endpoint
from protocol.security.http_tls import access

SWITCH_S = 0.0005
"""Switch interval of the interpreter. A thread that fetches or hashes a version waits up to this long for the
event loop, about once per megabyte."""


def serve_generator(
    config: GeneratorConfig,
    *,
    name: str,
    broker: str,
    model: str,
    run: str,
    seed: int,
    keys: Path | None = None,
    grace_s: float = 0.0,
) -> None:
    """Serve until SIGTERM, or until the broker sends Drain. Then drain: serve the episodes that need it.

    Args:
        name: peer name, unique in the run.
        broker: ZeroMQ endpoint of the broker.
        model: Hugging Face model folder. Its weights are policy version 0.
        keys: folder of the keys. None means that nothing is encrypted, and only this host can connect.
        grace_s: longest time to drain, in seconds.

    Raises:
        AddressRefused: other hosts can reach ``config.endpoint``, but nothing is encrypted.
        OSError: the address cannot be bound, for example because it is taken.
        KeysUnusable: the folder lacks keys of a generator.
        GeneratorFailed: the engine or the broker is lost; start the process again.
        LinkDown: no broker answered.
    """
    check_endpoint("generator.endpoint", config.endpoint, keys)
    sys.setswitchinterval(SWITCH_S)
    # Until the event loop installs its own handler, there is nothing to clean up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        asyncio.run(
            _serve(
                config, name=name, broker=broker, model=model, run=run, seed=seed, keys=keys, grace_s=grace_s
            )
        )
    finally:
        # The linger time lets the last chunks and the Goodbye leave.
        zmq.Context.instance().destroy(linger=1_000)


async def _serve(
    config: GeneratorConfig,
    *,
    name: str,
    broker: str,
    model: str,
    run: str,
    seed: int,
    keys: Path | None,
    grace_s: float,
) -> None:
    facts = read_model_facts(Path(model))
    async with _engine(config, model=model, seed=seed) as engine:
        cache = Cache(cache_folder(shared_memory(), run, broker), run, partial(access, keys))
        stage = Stage(f"{run}-{name}", facts.shapes, cache=cache)
        try:
            async with relay(config, cache, run, broker, keys) as weights_url:
                generator = Generator(
                    engine, config, facts, stage, name=name, run=run, keys=keys, grace_s=grace_s
                )
                generator.weights_url = weights_url
                await generator.serve(broker)
        finally:
            stage.close()


def _engine(
    config: GeneratorConfig, *, model: str, seed: int
) -> contextlib.AbstractAsyncContextManager[SamplingEngine]:
    """Return the context of the engine that the settings name."""
    return _http_engine(config) if config.backend == "http" else _vllm_engine(config, model=model, seed=seed)


@contextlib.asynccontextmanager
async def _http_engine(config: GeneratorConfig) -> AsyncIterator[SamplingEngine]:
    from actors.generator.http_engine.engine import HttpEngine

    engine = await HttpEngine.connect(config)
    try:
        yield engine
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def _vllm_engine(config: GeneratorConfig, *, model: str, seed: int) -> AsyncIterator[SamplingEngine]:
    from actors.generator.vllm_engine.engine import VllmEngine

    lock = lock_of_environment()
    if lock is not None:
        # An engine that starts measures the free memory of its GPU, so the learner must not update meanwhile.
        await hold_together(lock)
    engine = await VllmEngine.start(config, model=model, seed=seed)
    try:
        if lock is None:
            yield engine
        else:
            async with sleeping(engine, lock) as shared:
                yield shared
    finally:
        await engine.close()
