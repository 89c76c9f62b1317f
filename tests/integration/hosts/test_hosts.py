"""Hosts with keys of their own join a running run, drain without giving up an episode, and say why weights are late."""

import re
import signal

import pytest

from protocol.messages.peers import PublishWeights
from protocol.security import key_files
from tests.integration.hosts.hosts_harness import PATIENCE_S, Hosts
from tests.integration.protocol.encrypted_harness import until


@pytest.fixture
def hosts(tmp_path):
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.close()


def test_keys_made_later_mix_with_those_before_and_no_file_is_copied_between_hosts(hosts):
    """A bundle has the keys of its owner and broker.pub; the broker tells the others."""
    generator_a, actor_a = hosts.bundle("generator-a"), hosts.bundle("actor-a")
    assert {path.name for path in actor_a.glob("*.pub")} == {"actor-a.pub", "broker.pub"}
    assert {path.name for path in generator_a.glob("*.pub")} == {"generator-a.pub", "broker.pub"}
    hosts.generator("generator-a-0", generator_a)
    hosts.actor("actor-a-0", actor_a)
    assert hosts.sampled_by("t0", "t1") == {"generator-a-0"}

    # An actor of a later host, with the generator of the earlier one.
    hosts.actor("actor-b-0", hosts.bundle("actor-b"))
    assert hosts.stop("actor-a-0") == 0
    assert hosts.sampled_by("t2", "t3") == {"generator-a-0"}

    # A generator of a later host, with an actor that was there before.
    hosts.generator("generator-c-0", hosts.bundle("generator-c"))
    until(lambda: "generator-c-0" in hosts.broker.peers(), "the later generator joins", PATIENCE_S)
    assert hosts.stop("generator-a-0") == 0
    assert hosts.sampled_by("t4", "t5") == {"generator-c-0"}

    # A key is revoked where the broker is, and nowhere else.
    key_files.revoke(hosts.keys, "actor-b")
    assert hosts.processes["actor-b-0"].wait(PATIENCE_S) != 0
    assert "NotAdmitted: " in hosts.log("actor-b-0")
    until(lambda: "actor-b-0" not in hosts.broker.peers(), "the broker forgets the actor", PATIENCE_S)


NAMES = [f"t{n}" for n in range(8)]


def running(hosts, name="actor-a-0"):
    """Return the episodes that the actor runs, as it says. The broker counts leases that are still on the way."""
    peers = hosts.broker.status()["peers"]
    return next((p["gauges"].get("episodes_running", 0) for p in peers if p["name"] == name), 0)


def test_a_generator_serves_the_episodes_of_its_host_to_their_end(hosts):
    generator = hosts.generator("generator-a-0", hosts.bundle("generator-a"), pause_s=0.5)
    actor = hosts.actor(
        "actor-a-0", hosts.bundle("actor-a"), turns=6, concurrent_episodes=4, drain_timeout_s=60, max_turns=8
    )
    hosts.put(*NAMES)
    until(lambda: running(hosts) == 4, "four episodes run", PATIENCE_S)
    generator.send_signal(signal.SIGTERM)
    actor.send_signal(signal.SIGTERM)
    units = hosts.delivered(4)
    assert {segment.status for unit in units for segment in unit} == {"unfinished", "finished"}
    assert actor.wait(PATIENCE_S) == 0
    assert generator.wait(PATIENCE_S) == 0
    assert "draining: 4 episodes run" in hosts.log("actor-a-0")
    assert "given up" not in hosts.log("actor-a-0")
    assert "interrupted" not in hosts.log("actor-a-0")
    assert "leaves; 0 episodes still need it" in hosts.log("generator-a-0")


def test_a_generator_leaves_at_once_when_others_serve_and_at_a_second_signal(hosts):
    hosts.generator("generator-a-0", hosts.bundle("generator-a"), pause_s=0.5)
    hosts.generator("generator-a-1", hosts.folder / "for-generator-a", pause_s=0.5)
    # Episodes last longer than anything below.
    hosts.actor("actor-a-0", hosts.bundle("actor-a"), turns=200, concurrent_episodes=8, max_turns=202)
    until(lambda: len(hosts.broker.peers()) == 4, "all have joined", PATIENCE_S)
    until(lambda: "it takes new tasks" in hosts.log("actor-a-0"), "a generator lets the actor in", PATIENCE_S)
    hosts.put(*NAMES)
    until(lambda: running(hosts) == 8, "eight episodes run", PATIENCE_S)
    assert hosts.stop("generator-a-0") == 0
    assert re.search("leaves; 0 episodes", hosts.log("generator-a-0"))
    # The last one stays for the actor, which does not drain and takes no new task from now on.
    last = hosts.processes["generator-a-1"]
    last.send_signal(signal.SIGTERM)
    until(lambda: "no generator serves" in hosts.log("actor-a-0"), "the actor is told", PATIENCE_S)
    assert last.poll() is None
    last.send_signal(signal.SIGTERM)
    assert last.wait(PATIENCE_S) == 0
    assert "leaves; 0 episodes" not in hosts.log("generator-a-1")


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
