"""Test a generator whose engine divides each layer among two processes, with real vLLM on CPU."""

import time
from pathlib import Path

import pytest

from actors.config import GeneratorConfig
from actors.generator.vllm_plugin import is_registered
from tests.integration.actors.generator_harness import Running, children, engine_process, gone
from tests.integration.learner.tiny_qwen3 import VOCAB, greedy, publish, save, tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CONFIG = GeneratorConfig(kv_cache_mb=64, tensor_parallel_size=2)
PROMPT = [3 + i * i % 40 for i in range(100)]
# This stop token cannot occur.
GREEDY = {"max_tokens": 20, "temperature": 0.0, "stop_token_ids": [VOCAB]}


def workers(engine: int) -> list[int]:
    return [
        pid
        for pid in children(engine)
        if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_a_divided_engine_is_the_policy_of_each_version_and_ends_with_a_killed_generator(tmp_path):
    models = [tiny_model(tied=True, seed=version) for version in range(2)]
    assert is_registered(), "install the package again: pip install -e ."
    running = Running(CONFIG, save(models[0], tmp_path / "model"))
    try:
        engine = engine_process(running.process.pid)
        family = [engine, *workers(engine)]
        assert len(family) == 3, "an engine and two workers"
        actor = running.actor()
        before = running.ask(actor, "before", PROMPT, **GREEDY)
        assert before.ids == greedy(models[0], PROMPT, 20)
        running.update(publish(models[1], tmp_path / "published", version=1), version=1)
        after = running.ask(actor, "after", PROMPT, **GREEDY)
        assert (set(before.versions), set(after.versions)) == ({0}, {1})
        assert after.ids == greedy(models[1], PROMPT, 20)
        running.process.kill()
        running.process.join()
        deadline = time.monotonic() + 240.0
        while not all(map(gone, family)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in family if not gone(pid)] == []
    finally:
        running.close()
