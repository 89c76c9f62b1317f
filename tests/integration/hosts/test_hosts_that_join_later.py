"""Test hosts with keys of their own that join while a run goes on."""

import pytest

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
    until(lambda: "actor-b-0" not in hosts.broker.peers(), "the broker forgets the actor", PATIENCE_S)
