"""Test that the status of a run says why the generator of another host gets no new weights, and what to do."""

import pytest

from protocol.messages.peers import PublishWeights
from tests.integration.hosts.hosts_harness import PATIENCE_S, Hosts
from tests.integration.protocol.encrypted_harness import until


@pytest.fixture
def hosts(tmp_path):
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.close()


def waits(hosts, *words):
    """Return the lines of the status about the generator that have all of these words."""
    lines = hosts.broker.status()["waits"]
    return [
        line
        for line in lines
        if line.startswith("generator-b-0 serves version 0") and all(w in line for w in words)
    ]


def test_without_a_weights_server_the_status_names_the_setting_that_is_missing(hosts):
    hosts.generator("generator-b-0", hosts.bundle("generator-b"))
    until(lambda: "generator-b-0" in hosts.broker.peers(), "the generator joins", PATIENCE_S)
    manifest = str(hosts.folder / "only-on-the-head" / "v00000001" / "manifest.json")
    hosts.learner.send(PublishWeights(epoch=1, version=1, manifest=manifest))
    until(
        lambda: waits(hosts, "1 behind the newest", "nobody serves weights", "set weights.http"),
        "the status says why",
        PATIENCE_S,
    )
    assert "nobody serves weights" in hosts.log("generator-b-0")


def test_a_weights_server_that_does_not_answer_is_named(hosts):
    hosts.generator("generator-b-0", hosts.bundle("generator-b"))
    until(lambda: "generator-b-0" in hosts.broker.peers(), "the generator joins", PATIENCE_S)
    manifest = str(hosts.folder / "only-on-the-head" / "v00000001" / "manifest.json")
    nobody = "https://127.0.0.1:1"
    hosts.learner.send(PublishWeights(epoch=1, version=1, manifest=manifest, url=nobody))
    until(
        lambda: waits(hosts, nobody, "does `offbeat weights` run"), "the status names the address", PATIENCE_S
    )
