"""A host behind a firewall, a line that loses packets, and a partition: the run goes on, and its ledger closes."""

import contextlib
import shutil
import socket
import subprocess
import time

import pytest

from tests.e2e.namespaces import Host, why_not
from tests.integration.hosts.fleet_harness import Fleet
from tests.integration.hosts.hosts_harness import PATIENCE_S
from tests.integration.hosts.test_fleet import assert_closed, gauge
from tests.integration.protocol.encrypted_harness import until

HEAD, FAR, BRIDGE, PORT = "10.79.0.1", "10.79.0.7", "offbeat-sw", "offbeat-p7"
CUT_S, LOSSY_S, BACK_S = 20.0, 20.0, 20.0
TABLE = """table netdev {name} {{
    chain first {{
        type filter hook ingress device {device} priority 0; policy accept;
        {rule}
    }}
}}"""
# Nobody can open a connection to the host; the answers to its own ones pass.
WALL = TABLE.format(name="offbeat_wall", device="eth0", rule="tcp flags & (syn|ack) == syn drop")
LOSS = "numgen random mod 100 lt 5 drop"
LOSS_IN = TABLE.format(name="offbeat_in", device="eth0", rule=LOSS)
LOSS_OUT = TABLE.format(name="offbeat_out", device=PORT, rule=LOSS)


def why_no_network():
    """Return why this machine has no network that can be harmed, or ""."""
    if found := why_not():
        return found
    if not shutil.which("nft"):
        return "nft is not installed"
    links = "ip link add probe type bridge && ip link add eth0 type veth peer name other"
    probe = f"{links} && nft -f - <<'N'\n{WALL}\n{LOSS_IN}\nN"
    done = subprocess.run(["unshare", "--net", "sh", "-c", probe], capture_output=True, text=True, timeout=30)
    return done.stderr.strip() if done.returncode else ""


WHY_NOT = why_no_network()
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network to harm: {WHY_NOT}"),
]


def ip(*words, check=True):
    subprocess.run(["ip", *words], check=check, capture_output=True)


def nft(*words, check=True, text=None):
    subprocess.run(["nft", *words], check=check, capture_output=True, input=text, text=True)


@contextlib.contextmanager
def switch(home):
    """Lay a switch here with a host behind a firewall, and yield the host. It stays up when the host's port is down."""
    ip("link", "del", BRIDGE, check=False)
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("addr", "add", f"{HEAD}/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    host = Host("far", FAR, home / "far", home)
    try:
        host.plug_in(BRIDGE, PORT)
        host.run(f"nft -f - <<'N'\n{WALL}\nN")
        yield host
    finally:
        host.close()
        ip("link", "del", BRIDGE, check=False)
        nft("delete", "table", "netdev", "offbeat_out", check=False)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    home = tmp_path_factory.mktemp("network")
    with switch(home) as host:
        yield home, host


class Numbered(Fleet):
    """A fleet that counts the tasks it was given."""

    given = 0

    def names(self, count):
        self.given += count
        return [f"t{number}" for number in range(self.given - count, self.given)]

    def sampled(self, count):
        """Run so many tasks, and return the generators that sampled them."""
        return self.sampled_by(*self.names(count))

    def is_complete(self, host="far"):
        found = self.status_of(host)
        return found and (found["generators"], found["actors"]) == (1, 2)


@pytest.fixture(scope="module")
def fleet(network):
    """A run, and the firewalled host in it with a generator and two actors."""
    home, host = network
    fleet = Numbered(home, HEAD)
    try:
        fleet.join("far", fleet.ticket("--host", "far"), pause_s=0.1, inside=host)
        fleet.await_host("far", "far")
        yield fleet
    finally:
        fleet.close()


def test_a_host_that_can_only_connect_outwards_trains(fleet):
    peers = fleet.broker.status()["peers"]
    (endpoint,) = (peer["endpoint"] for peer in peers if peer["name"] == "generator-far-0")
    where, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    assert where == FAR
    with pytest.raises(TimeoutError):
        socket.create_connection((where, int(port)), 1.0)
    # Its own actors use its own generator, and all else goes through connections to the head.
    assert fleet.sampled(8) == {"generator-far-0"}
    assert gauge(fleet, "leases_lost_total") == 0


@pytest.mark.soak
def test_loss_and_a_partition_of_one_host(fleet, network):
    home, host = network
    shutil.copytree(home / "far" / "cache", home / "near" / "cache")
    fleet.join("near", fleet.ticket("--host", "near"), pause_s=0.1)
    fleet.await_host("near", "near")

    # One packet in twenty is lost, both ways: nobody leaves, and both hosts work.
    counts = ("joined_total", "lost_total", "leases_lost_total")
    said = [gauge(fleet, name) for name in counts]
    host.run(f"nft -f - <<'N'\n{LOSS_IN}\nN")
    nft("-f", "-", text=LOSS_OUT)
    before, began, by = fleet.given, time.monotonic(), set()
    while time.monotonic() < began + LOSSY_S:
        by |= fleet.sampled(8)
        assert fleet.is_complete()
    assert by == {"generator-far-0", "generator-near-0"}
    assert [gauge(fleet, name) for name in counts] == said
    host.run("nft delete table netdev offbeat_in")
    nft("delete", "table", "netdev", "offbeat_out")
    print(f"loss of 5 %: {fleet.given - before} episodes in {LOSSY_S:.0f} s, nobody left")

    # Nothing passes: the head notices, the other host does the tasks, and the host comes back by itself.
    before = gauge(fleet, "leases_lost_total")
    names = fleet.names(16)
    fleet.put(*names)
    began = time.monotonic()
    ip("link", "set", PORT, "down")
    until(lambda: fleet.status_of("far") is None, "the head notices", PATIENCE_S)
    noticed_s = time.monotonic() - began
    fleet.delivered(len(names))
    while time.monotonic() < began + CUT_S:
        assert fleet.sampled(4) == {"generator-near-0"}
    again = gauge(fleet, "leases_lost_total") - before
    ip("link", "set", PORT, "up")
    healed = time.monotonic()
    back = {}

    def all_back():
        peers = {peer["name"] for peer in fleet.broker.status()["peers"] if peer["on_host"] == "far"}
        back.update({name: time.monotonic() - healed for name in peers - back.keys()})
        return len(back) == 3

    until(all_back, "all of the host come back", PATIENCE_S)
    until(lambda: "generator-far-0" in fleet.sampled(8), "it samples", PATIENCE_S)
    works_s = time.monotonic() - healed
    seconds = ", ".join(f"{name} {after:.1f} s" for name, after in sorted(back.items()))
    print(
        f"partition of {CUT_S:.0f} s: noticed after {noticed_s:.1f} s, {again} leases dealt again; back: {seconds}; "
        f"samples after {works_s:.1f} s"
    )
    assert max(*back.values(), works_s) < BACK_S
    assert fleet.status_of("far")["restarts"] == 0
    assert fleet.end("far") == 75, fleet.log_of("far")
    assert fleet.end("near") == 75, fleet.log_of("near")
    proof = fleet.proof()
    print(proof)
    assert_closed(proof, units=fleet.given)
