"""Test the generator in front of a real vLLM server that it did not start."""

import contextlib
import multiprocessing
import queue
import time

import pytest

from actors.config import GeneratorConfig
from actors.generator.generator import serve_generator
from launch.processes import free_ports
from protocol.messages.peers import Generators, Hello, PublishWeights
from protocol.sockets import ThreadLink
from tests.integration.actors.generator_harness import RUN, ActorStub, Running
from tests.integration.actors.stopping import check_stop_string
from tests.integration.learner.tiny_qwen3 import VOCAB, greedy, publish, save, score, tiny_model
from tests.integration.vllm_server import serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOLERANCE = 1e-4
NEVER = [VOCAB]
PROMPT = [3, 4, 5, 6, 7]


ARGUMENTS = (
    *("--enable-scale-out", "--skip-tokenizer-init", "--logprobs-mode", "processed_logprobs"),
    *("--worker-extension-cls", "actors.vllm_worker.WeightWorker"),
    *("--weight-transfer-config", '{"backend": "offbeat_file"}'),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("http")
    save(tiny_model(tied=True, seed=0), folder / "model")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    log = folder / "server.log"
    with serving(folder / "model", log, *ARGUMENTS, start_s=120.0, VLLM_SERVER_DEV_MODE="1") as url:
        yield url


@pytest.fixture(scope="module")
def generator(server, folder):
    running = Running(GeneratorConfig(backend="http", url=server, max_model_len=4096), folder / "model")
    yield running
    running.process.terminate()
    running.until(lambda: running.broker.goodbye is not None)
    running.process.join(10.0)
    exitcode = running.process.exitcode
    running.close()
    assert exitcode == 0


def test_a_server_streams_changes_weights_in_mid_sequence_and_aborts(generator, folder):
    policies = {version: tiny_model(tied=True, seed=version) for version in (0, 1)}
    actor = generator.actor()
    actor.ask("swap", PROMPT, max_tokens=400, stop_token_ids=NEVER)
    generator.until(lambda: len(actor.answers["swap"].ids) >= 20)
    generator.update(publish(policies[1], folder / "published", version=1), version=1)
    answer = actor.answers["swap"]
    generator.until(lambda: answer.finish_reason != "")
    assert (answer.finish_reason, len(answer.ids)) == ("length", 400)
    assert set(answer.versions) == {0, 1}
    assert answer.versions == sorted(answer.versions)
    for version, policy in policies.items():
        claimed = [i for i, v in enumerate(answer.versions) if v == version]
        expected = score(policy, PROMPT, answer.ids)
        assert [answer.logps[i] for i in claimed] == pytest.approx(
            [expected[i] for i in claimed], abs=TOLERANCE
        )

    after = generator.ask(actor, "after", PROMPT, max_tokens=20, temperature=0.0, stop_token_ids=NEVER)
    assert after.ids == greedy(policies[1], PROMPT, 20)

    actor.ask("abort", PROMPT, max_tokens=900, stop_token_ids=NEVER)
    generator.until(lambda: len(actor.answers["abort"].ids) >= 20)
    actor.abort("abort")
    aborted = actor.answers["abort"]
    generator.until(lambda: aborted.finish_reason != "")
    assert aborted.finish_reason == "abort"
    assert 20 <= len(aborted.ids) < 900


def test_a_turn_on_a_server_ends_with_the_token_that_completes_a_stop_string(generator):
    check_stop_string(generator)


def test_what_the_server_refuses_is_the_error_of_that_request_alone(generator):
    actor = generator.actor("errors")
    # The prompt is too long for the server, but passes the generator's own check.
    answer = generator.ask(actor, "long", [3] * 2_000)
    assert answer.finish_reason == "error"
    assert "status 4" in answer.error
    assert generator.ask(actor, "fine", PROMPT, max_tokens=2, stop_token_ids=NEVER).finish_reason == "length"


def run_broker(endpoint: str, http: str) -> None:
    from broker.config import BrokerConfig
    from broker.service import serve

    serve(BrokerConfig(endpoint=endpoint, http=http, heartbeat_s=0.2), run=RUN, max_policy_lag=4)


class Peer:
    """A peer of the broker, and the messages it has received."""

    def __init__(self, endpoint: str, role: str) -> None:
        self.link = ThreadLink(endpoint, Hello(role=role, peer=f"{role}-0", incarnation=1))
        self._heard = []

    def until(self, kind: type, matches=lambda message: True):
        """Return the first matching message of a kind, received before or within 20 s."""
        deadline = time.monotonic() + 240.0
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._heard.append((self.link.inbox.get(timeout=0.05) or [None])[0])
            for message in self._heard:
                if isinstance(message, kind) and matches(message):
                    return message
        raise AssertionError(f"no such {kind.__name__} among {self._heard}")


def test_a_generator_meets_actors_and_the_learner_through_the_broker(server, folder):
    port, http_port = free_ports(2)
    endpoint = f"tcp://127.0.0.1:{port}"
    spawn = multiprocessing.get_context("spawn")
    broker = spawn.Process(target=run_broker, args=(endpoint, f"127.0.0.1:{http_port}"))
    config = GeneratorConfig(backend="http", url=server)
    names = {"name": "generator-0", "broker": endpoint, "model": str(folder / "model"), "run": RUN, "seed": 0}
    generator = spawn.Process(target=serve_generator, args=(config,), kwargs=names)
    broker.start()
    generator.start()
    learner, actor = Peer(endpoint, "learner"), Peer(endpoint, "actor")
    try:
        info = actor.until(Generators, lambda m: m.generators).generators[0]
        assert info.peer == "generator-0"
        stub = ActorStub(info.endpoint)
        stub.ask("held", PROMPT, min_policy_version=5, stop_token_ids=NEVER)
        policy = tiny_model(tied=True, seed=5)
        manifest = publish(policy, folder / "published", version=5)
        learner.link.send(PublishWeights(epoch=0, version=5, manifest=str(manifest)))
        deadline = time.monotonic() + 240.0
        while not stub.answers["held"].finish_reason and time.monotonic() < deadline:
            stub.poll()
        answer = stub.answers["held"]
        assert set(answer.versions) == {5}
        assert answer.logps == pytest.approx(score(policy, PROMPT, answer.ids), abs=TOLERANCE)
        generator.terminate()
        generator.join(120.0)
        assert generator.exitcode == 0
        stub.close()
    finally:
        for peer in (learner, actor):
            peer.link.close("the test is over")
        for process in (generator, broker):
            process.terminate()
            process.join(10.0)
            process.kill()
