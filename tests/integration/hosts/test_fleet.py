"""A host joins a run by one file and one command, is watched there, drains, and ends with a code for engines."""

import os
import shutil
import signal
import time

import pytest

from launch.cli import main
from launch.fleet.ticket import read_ticket, secrets_of
from protocol.messages.peers import Goodbye
from protocol.security import key_files
from tests.campaigns.faults.proof import MUST_BE_EMPTY
from tests.integration.hosts.fleet_harness import TURNS, Fleet
from tests.integration.hosts.hosts_harness import PATIENCE_S
from tests.integration.hosts.test_hosts import running
from tests.integration.protocol.encrypted_harness import until

pytestmark = pytest.mark.timeout(400)
NOTICED_S = 10.0
"""A host is lost after five missed heartbeats of one second; the rest is for a busy machine."""


@pytest.fixture
def fleet(tmp_path):
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def gauge(fleet, name):
    return fleet.broker.status()["gauges"][f"hosts/{name}"]


def pids(fleet, host):
    return {peer["name"]: peer["pid"] for peer in fleet.broker.status()["peers"] if peer["on_host"] == host}


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def assert_closed(proof, units, duplicates=0):
    """Assert that all of these units, of one episode each, were trained once, and that nothing was lost.

    Args:
        duplicates: segments that came again, because their first ack did not arrive.
    """
    assert not any(getattr(proof, what) for what in MUST_BE_EMPTY), proof
    assert (proof.units_trained, proof.outcomes["trained"], proof.held) == (units, units * TURNS, 0), proof
    assert set(proof.outcomes) <= {"trained", "superseded"}, proof
    assert proof.acknowledged + duplicates >= units * TURNS, proof


def test_hosts_come_by_a_ticket_and_go_by_signal_command_and_revocation(fleet, capfd):
    command = fleet.ticket("--host", "gpu7")
    # One file, one command, no settings.
    assert command == "offbeat host --ticket gpu7.ticket"
    fleet.join("gpu7", command, pause_s=0.2)
    fleet.await_host("gpu7", "gpu7")
    assert fleet.sampled_by("t0", "t1") == {"generator-gpu7-0"}
    # The model came from the weights server, and the environment with the ticket.
    (cached,) = (fleet.home / "gpu7" / "cache" / "offbeat" / "models").iterdir()
    assert (cached / "tokenizer.json").read_bytes() == (fleet.model / "tokenizer.json").read_bytes()
    folder = fleet.home / "gpu7" / "runs" / "run" / "hosts" / "gpu7"
    assert (folder / "env" / "0" / "counting.py").exists()
    hidden = secrets_of(read_ticket(str(fleet.home / "gpu7" / "gpu7.ticket"), {}))

    # A process that dies is started again, and the head hears how it ended.
    os.kill(pids(fleet, "gpu7")["actor-gpu7-1"], signal.SIGKILL)
    until(lambda: (fleet.status_of("gpu7") or {}).get("restarts"), "the actor comes back", PATIENCE_S)
    assert "actor-gpu7-1 was ended by Killed" in fleet.status_of("gpu7")["died"]
    fleet.await_host("gpu7", "gpu7")

    # A further host of a ticket that many share joins later.
    shutil.copytree(fleet.home / "gpu7" / "cache", fleet.home / "late" / "cache")
    late = fleet.ticket("--any", "pool")
    fleet.join("late", late, "--actors", "1", "--generators", "1", pause_s=0.2)
    pool = until(
        lambda: next((h["name"] for h in fleet.broker.status()["hosts"] if h["name"] != "gpu7"), None),
        "the host joins",
        PATIENCE_S,
    )
    assert pool.startswith("pool-")
    fleet.await_host("late", pool, actors=1)
    assert gauge(fleet, "count") == 2

    # Killed whole, in the middle of episodes: the head notices, the other host gets the tasks, and the run goes on.
    names = [f"k{n}" for n in range(12)]
    fleet.put(*names)
    until(lambda: running(fleet, f"actor-{pool}-0"), "episodes run", PATIENCE_S)
    lost = gauge(fleet, "leases_lost_total")
    fleet.kill("late", pool)
    began = time.monotonic()
    until(lambda: fleet.status_of(pool) is None, "the head notices", PATIENCE_S)
    noticed_s = time.monotonic() - began
    assert {s.status for unit in fleet.delivered(len(names)) for s in unit} == {"unfinished", "finished"}
    done_s = time.monotonic() - began
    assert noticed_s < NOTICED_S
    again = gauge(fleet, "leases_lost_total") - lost
    assert again > 0
    fleet.join("late", late, "--actors", "1", "--generators", "1")
    fleet.await_host("late", pool, actors=1)

    # Drained by command, it stays away.
    assert main(["drain", str(fleet.run), pool]) == 0
    assert f"{pool} has left" in capfd.readouterr().out
    assert fleet.hosts["late"].wait(PATIENCE_S) == 0, fleet.log_of("late")

    # One SIGTERM in the middle of episodes: all are brought to their end, and none is dealt again.
    names = [f"s{n}" for n in range(6)]
    lost = gauge(fleet, "leases_lost_total")
    fleet.put(*names)
    until(lambda: running(fleet, "actor-gpu7-0"), "episodes run", PATIENCE_S)
    processes = pids(fleet, "gpu7")
    assert fleet.end("gpu7") == 75, fleet.log_of("gpu7")
    assert all(map(is_gone, processes.values()))
    assert {s.status for unit in fleet.delivered(len(names)) for s in unit} == {"unfinished", "finished"}
    assert gauge(fleet, "leases_lost_total") == lost
    assert "given up" not in (folder / "logs" / "actor-gpu7-0.log").read_text()
    assert not (folder / "keys").exists()
    texts = [path.read_text() for path in (*folder.rglob("*.log"), *folder.rglob("*.json"))]
    assert not any(secret in text for secret in hidden for text in [*texts, fleet.log_of("gpu7")])

    # The same ticket brings the host back, until its key is revoked.
    fleet.join("gpu7", command)
    fleet.await_host("gpu7", "gpu7")
    key_files.revoke(fleet.keys, "host-gpu7")
    assert fleet.hosts["gpu7"].wait(PATIENCE_S) == 65, fleet.log_of("gpu7")
    until(lambda: fleet.status_of("gpu7") is None, "the broker forgets the host", PATIENCE_S)

    # The ledger closes: each stored segment was trained or has another outcome, and none was trained twice.
    proof = fleet.proof()
    print(
        f"killed: noticed after {noticed_s:.1f} s, {again} leases dealt again, done after {done_s:.1f} s; {proof}"
    )
    assert_closed(proof, units=20)


def test_when_the_run_is_over_all_processes_of_all_hosts_end(fleet):
    fleet.join("gpu7", fleet.ticket("--host", "gpu7"), "--actors", "1", pause_s=0.5)
    fleet.await_host("gpu7", "gpu7", actors=1)
    processes = pids(fleet, "gpu7")
    fleet.put("t0", "t1")
    until(lambda: running(fleet, "actor-gpu7-0"), "episodes run", PATIENCE_S)
    fleet.learner.send(Goodbye(reason="all steps done", then="over"))
    assert fleet.hosts["gpu7"].wait(PATIENCE_S) == 0, fleet.log_of("gpu7")
    assert all(map(is_gone, processes.values()))
    assert fleet.broker.process.wait(PATIENCE_S) == 0
    assert not list((fleet.home / "gpu7" / "runs" / "run" / "hosts" / "gpu7").rglob("*.secret"))
