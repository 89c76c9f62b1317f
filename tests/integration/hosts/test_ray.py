"""A Ray cluster of two nodes runs hosts: one dies with its node, comes back on another, and the ledger closes."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from launch.cli import main
from tests.integration.hosts.fleet_harness import OFFBEAT, Fleet
from tests.integration.hosts.hosts_harness import PATIENCE_S, ROOT
from tests.integration.hosts.test_fleet import assert_closed, gauge
from tests.integration.hosts.test_hosts import running
from tests.integration.hosts.test_slurm import HEAD
from tests.integration.protocol.encrypted_harness import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
FOLDER = ROOT / "build" / "ray"
LONG_S = 600.0
"""Workers of Ray and the processes of a host start one after the other, on a machine that may be crowded."""


@pytest.fixture(scope="module")
def packages():
    """Folder with Ray, which is not among the packages for development; what it needs is."""
    if not (FOLDER / "ray").exists():
        install = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            "--no-deps",
        ]
        words = [*install, "--target", FOLDER, "ray>=2.50"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            pytest.skip(f"Ray cannot be installed here: {done.stderr.strip()[-300:]}")
    return FOLDER


@pytest.fixture
def fleet(tmp_path, monkeypatch, packages):
    fleet = Fleet(tmp_path / "fleet")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run").symlink_to(fleet.run)
    program = tmp_path / "bin" / "offbeat"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{HEAD}{OFFBEAT}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{packages}:{ROOT}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Workers have a niceness of 15 otherwise, and so have hosts.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("COUNTING_PAUSE_S", "0.2")
    # The proof reads from the actors' logs what was acknowledged.
    monkeypatch.setenv("OFFBEAT_LOG_LEVEL", "debug")
    monkeypatch.chdir(tmp_path)
    yield fleet
    fleet.close()


class Cluster:
    """The program of the cluster."""

    def __init__(self, folder):
        self._log = folder / "cluster.log"
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.hosts.ray_cluster"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self.address = self._answer("address")

    def ask(self, line):
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer("done")

    def close(self):
        # It has ended by itself if a node could not start.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("end\n")
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)
        self._process.stdout.close()

    def _answer(self, word):
        # Ray writes pages to standard output.
        for line in self._process.stdout:
            if line.startswith(f"{word} "):
                return line.split(maxsplit=1)[1].strip()
        raise AssertionError(self._log.read_text()[-3000:])


@pytest.fixture
def cluster(tmp_path, fleet):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def hosts(fleet):
    return [one["name"] for one in fleet.broker.status()["hosts"]]


def whole(fleet):
    """Return the names of hosts whose processes have all joined."""
    return [
        one["name"] for one in fleet.broker.status()["hosts"] if (one["generators"], one["actors"]) == (1, 2)
    ]


def test_a_host_comes_back_on_another_node_and_the_ledger_closes(fleet, cluster, tmp_path, capfd):
    cluster.ask("start n1")
    (tmp_path / "run.toml").write_text(
        f'[run]\nname = "run"\n[model]\npath = "{fleet.model}"\n[env]\nname = "{fleet.env}"\n'
    )
    (tmp_path / "site.toml").write_text(
        f'[ray]\ncluster = "{cluster.address}"\nhosts = 1\nresources = {{host = 1}}\nfolder = "{fleet.home}"\n'
        'address = "127.0.0.1"\ngrace_s = 25\n'
    )
    with open(tmp_path / "launch.log", "wb") as log:
        launch = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "launch", "run.toml", "--on", "ray", "--site", "site.toml"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        began = time.monotonic()

        def joined():
            assert launch.poll() is None, (tmp_path / "launch.log").read_text()
            return whole(fleet)

        (first,) = until(joined, "a host joins", LONG_S)
        took = {"from the command to the first host": time.monotonic() - began}
        assert first.startswith("r-0-")
        assert fleet.sampled_by("t0", "t1") == {f"generator-{first}-0"}

        # The node dies in the middle of episodes. Ray starts the host again where there is room.
        names = [f"k{n}" for n in range(8)]
        fleet.put(*names)
        until(lambda: running(fleet, f"actor-{first}-0"), "episodes run", PATIENCE_S)
        cluster.ask("start n2")
        began = time.monotonic()
        cluster.ask("kill n1")
        second = until(
            lambda: next((name for name in whole(fleet) if name != first), None), "the host is back", LONG_S
        )
        took["from the death of the node to the host on another"] = time.monotonic() - began
        assert second.startswith("r-0-")
        units = fleet.delivered(len(names))
        lost = gauge(fleet, "leases_lost_total")
        assert {s.status for unit in units for s in unit} == {"unfinished", "finished"}
        until(lambda: hosts(fleet) == [second], "the host of the dead node is gone", PATIENCE_S)

        # Up, and down again: the youngest drains.
        cluster.ask("start n3")
        assert main(["scale", "runs/run", "generators=2"]) == 0
        until(lambda: len(hosts(fleet)) == 2, "a second host joins", LONG_S)
        assert main(["scale", "runs/run", "generators=1"]) == 0
        until(lambda: hosts(fleet) == [second], "the youngest has left", LONG_S)
        assert "hosts: 2 wanted before, 1 now" in capfd.readouterr().out

        launch.send_signal(signal.SIGTERM)
        assert launch.wait(LONG_S) == 0, (tmp_path / "launch.log").read_text()
        until(lambda: not hosts(fleet), "all hosts have left", PATIENCE_S)
    finally:
        if launch.poll() is None:
            launch.kill()
            launch.wait(PATIENCE_S)
    assert_closed(fleet.proof(), 2 + len(names))
    with capfd.disabled():
        print(f"{lost:.0f} leases lost; {', '.join(f'{what}: {s:.1f} s' for what, s in took.items())}")
