"""Test a generator on a host without the learner: real engine, weights over HTTP, relay to the next host."""

import pytest

from actors.config import GeneratorConfig
from actors.generator.weights.cache import Cache
from protocol.messages.peers import WeightsReady
from protocol.weights.format import DATA
from tests.integration.actors.generator_harness import RUN, Running
from tests.integration.learner.tiny_qwen3 import greedy, publish, save, tiny_model
from tests.integration.protocol.weights_harness import server

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [3, 4, 5, 6, 7]


def test_it_fetches_what_it_is_told_of_and_serves_it_on(tmp_path):
    first, second = tiny_model(tied=False, seed=0), tiny_model(tied=False, seed=1)
    versions = tmp_path / "learner"
    manifest = publish(second, versions, version=1, run=RUN)
    config = GeneratorConfig(
        max_model_len=64, kv_cache_mb=16, weights_http="127.0.0.1:0", stall_timeout_s=60.0
    )
    with server(versions, tmp_path, run=RUN) as url:
        running = Running(config, save(first, tmp_path / "model"))
        try:
            actor = running.actor()
            before = running.ask(actor, "before", PROMPT, max_tokens=8, temperature=0.0)
            assert before.ids == greedy(first, PROMPT, 8)
            ready = WeightsReady(epoch=0, version=1, manifest="/nowhere/manifest.msgpack", sources=[url])
            running.broker.send(ready)
            running.until(lambda: running.broker.beat.policy_version == 1)
            after = running.ask(actor, "after", PROMPT, max_tokens=8, temperature=0.0)
            assert after.ids == greedy(second, PROMPT, 8)
            assert set(after.versions) == {1}
            next_host = Cache(tmp_path / "shm" / "offbeat-cache-test-1", RUN)
            relayed = next_host.obtain(0, 1, [running.broker.hello.weights_url])
            assert relayed.with_name(DATA).read_bytes() == manifest.with_name(DATA).read_bytes()
            next_host.close()
        finally:
            running.close()
