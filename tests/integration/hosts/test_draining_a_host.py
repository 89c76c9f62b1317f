"""Test that a host which ends gives up no episode, although its generator gets the signal with its actor."""

import re
import signal

import pytest

from tests.integration.hosts.hosts_harness import PATIENCE_S, Hosts
from tests.integration.protocol.encrypted_harness import until

NAMES = [f"t{n}" for n in range(8)]


@pytest.fixture
def hosts(tmp_path):
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.close()


def running(hosts):
    """Return the episodes that the actor runs, as it says. The broker counts leases that are still on the way."""
    peers = hosts.broker.status()["peers"]
    return next((p["gauges"].get("episodes_running", 0) for p in peers if p["name"] == "actor-a-0"), 0)


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
    hosts.actor("actor-a-0", hosts.bundle("actor-a"), turns=6, concurrent_episodes=8, max_turns=8)
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
