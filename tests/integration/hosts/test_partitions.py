"""A line that passes nothing for a minute, in one direction or both: the run goes on, and the host comes back."""

import shutil
import time

import pytest

from tests.integration.hosts.hosts_harness import PATIENCE_S
from tests.integration.hosts.test_bad_network import (
    BACK_S,
    PORT,
    TABLE,
    WHY_NOT,
    fleet,
    network,
    nft,
)
from tests.integration.hosts.test_fleet import assert_closed, gauge
from tests.integration.protocol.encrypted_harness import until

__all__ = ["fleet", "network"]
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network to harm: {WHY_NOT}"),
]
PARTITION_S = 60.0
CUT_IN = TABLE.format(name="offbeat_in", device="eth0", rule="drop")
CUT_OUT = TABLE.format(name="offbeat_out", device=PORT, rule="drop")


def harm(host, inwards, outwards):
    """Load these rules for what comes to the host, and for what it sends; "" for none."""
    if inwards:
        host.run(f"nft -f - <<'N'\n{inwards}\nN")
    if outwards:
        nft("-f", "-", text=outwards)


def heal(host):
    host.run("nft delete table netdev offbeat_in || true")
    nft("delete", "table", "netdev", "offbeat_out", check=False)


def test_a_minute_without_a_line_in_both_or_one_direction(fleet, network):
    home, host = network
    shutil.copytree(home / "far" / "cache", home / "near" / "cache", dirs_exist_ok=True)
    fleet.join("near", fleet.ticket("--host", "near"), pause_s=0.1)
    fleet.await_host("near", "near")
    until(fleet.is_complete, "the host behind the firewall is there", PATIENCE_S)
    for ways, inwards, outwards in (
        ("both ways", CUT_IN, CUT_OUT),
        ("to the host", CUT_IN, ""),
        ("to the head", "", CUT_OUT),
    ):
        names = fleet.names(16)
        lost = gauge(fleet, "leases_lost_total")
        fleet.put(*names)
        began = time.monotonic()
        harm(host, inwards, outwards)
        fleet.delivered(len(names))
        done_s = time.monotonic() - began
        steps = 0
        while time.monotonic() < began + PARTITION_S:
            fleet.sampled(4)
            steps += 1
        assert steps > 5
        heal(host)
        healed = time.monotonic()
        until(fleet.is_complete, "the host comes back", PATIENCE_S)
        back_s = time.monotonic() - healed
        until(lambda: "generator-far-0" in fleet.sampled(8), "it samples", PATIENCE_S)
        works_s = time.monotonic() - healed
        again = gauge(fleet, "leases_lost_total") - lost
        duplicates = fleet.broker.status()["ledger"]["duplicate_segments"]
        print(
            f"60 s without a line {ways}: 16 tasks under way done after {done_s:.1f} s, {steps} times 4 more, "
            f"{again:.0f} leases dealt again; back after {back_s:.1f} s, samples after {works_s:.1f} s; {duplicates} "
            "duplicates in all"
        )
        assert works_s < BACK_S
    # All of them connect again before their supervisor takes one for hung.
    assert fleet.status_of("far")["restarts"] == 0, fleet.log_of("far")
    assert fleet.end("far") == 75, fleet.log_of("far")
    assert fleet.end("near") == 75, fleet.log_of("near")
    proof = fleet.proof()
    print(proof)
    assert_closed(proof, units=fleet.given, duplicates=duplicates)
