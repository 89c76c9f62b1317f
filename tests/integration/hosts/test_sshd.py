"""The script of `offbeat launch --on ssh` starts a host through a real sshd, whose connection may break."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.fleet.job import Job
from launch.fleet.render import render
from launch.fleet.site import Site, SshSite
from protocol.messages.peers import Goodbye
from tests.e2e.namespaces import Host, why_not
from tests.integration.hosts.fleet_harness import OFFBEAT, Fleet
from tests.integration.hosts.hosts_harness import PATIENCE_S, ROOT
from tests.integration.protocol.encrypted_harness import until

HEAD, FAR, BRIDGE = "10.81.0.1", "10.81.0.7", "offbeat-ssh"
SSHD, SSH = shutil.which("sshd") or "/usr/sbin/sshd", shutil.which("ssh")
WHY_NOT = why_not() or ("" if SSH and Path(SSHD).exists() else "sshd or ssh is not installed")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no sshd: {WHY_NOT}"),
]


def ip(*words, check=True):
    subprocess.run(["ip", *words], check=check, capture_output=True)


@pytest.fixture
def far(tmp_path):
    """A host whose sshd admits the key of the test."""
    ip("link", "del", BRIDGE, check=False)
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("addr", "add", f"{HEAD}/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    for name in ("own", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    users = Path("/etc/passwd").read_text()
    if "\nsshd:" not in users:
        users += "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
    (tmp_path / "passwd").write_text(users)
    host = Host("far", FAR, tmp_path / "far", tmp_path)
    try:
        host.plug_in(BRIDGE, "offbeat-s7")
        host.run(
            f"mount --bind {tmp_path}/passwd /etc/passwd && mount -t tmpfs none /run && mkdir -m 755 /run/sshd"
        )
        options = (
            "UsePAM=no", "StrictModes=no", "PermitRootLogin=yes", "PidFile=none",
            f"HostKey={tmp_path}/host", f"AuthorizedKeysFile={tmp_path}/own.pub",
        )  # fmt: skip
        host.start(f"{SSHD} -D -e -f /dev/null {' '.join(f'-o {option}' for option in options)}")
        yield host
    finally:
        # What sshd started is no child of the test, and would keep the namespace.
        for pid in of_namespace(host):
            os.kill(pid, signal.SIGKILL)
        host.close()
        ip("link", "del", BRIDGE, check=False)


def test_a_host_joins_through_sshd_comes_back_after_a_fault_and_ends_with_the_run(far, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh.conf").write_text(
        f"Host far\n  HostName {FAR}\n  User root\n  IdentityFile {tmp_path}/own\n  StrictHostKeyChecking no\n"
        f"  UserKnownHostsFile {tmp_path}/known\n"
    )
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {SSH} -F {programs}/ssh.conf "$@"\n')
    (programs / "offbeat.py").write_text(OFFBEAT)
    # As a virtual environment would on the host.
    (programs / "offbeat").write_text(
        f"#!/bin/sh\nexport PYTHONPATH={ROOT} OMP_NUM_THREADS=1 XDG_CACHE_HOME={tmp_path}/far/cache\n"
        f'exec {sys.executable} {programs}/offbeat.py "$@"\n'
    )
    for name in ("ssh", "offbeat"):
        (programs / name).chmod(0o755)
    fleet = Fleet(tmp_path / "fleet", HEAD)
    try:
        fleet.ticket("--host", "far")
        site = Site(ssh=SshSite(hosts=("far",), folder=str(far.folder), setup=f"PATH={programs}:$PATH"))
        (programs / "host.sh").write_text(render(Job("run.toml", (), fleet.config), site, "ssh")["host.sh"])
        with open(tmp_path / "script.log", "wb") as log:
            script = subprocess.Popen(
                [
                    "bash",
                    str(programs / "host.sh"),
                    "far",
                    str(tmp_path / "fleet" / "tickets" / "far.ticket"),
                ],
                env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
                stdout=log,
                stderr=log,
            )
        try:

            def joined():
                assert script.poll() is None, (tmp_path / "script.log").read_text()
                return fleet.status_of("far")

            def is_whole():
                found = fleet.status_of("far")
                return found and (found["generators"], found["actors"]) == (1, 2)

            until(joined, "the host joins", PATIENCE_S)
            until(is_whole, "all of the host join", PATIENCE_S)
            assert fleet.sampled_by("t0", "t1") == {"generator-far-0"}
            # The ticket is on no command line, and in no file but the one that the script has read.
            (told,) = far.folder.glob("runs/run/hosts/far")
            assert not list(told.rglob("*.ticket"))
            # All processes are killed, as by a fault: the script starts the host again.
            first = {peer["pid"] for peer in fleet.broker.status()["peers"] if peer["on_host"] == "far"}
            for pid in [*supervisors(first), *first]:
                os.kill(pid, signal.SIGKILL)
            until(lambda: fleet.status_of("far") is None, "the head notices", PATIENCE_S)
            until(is_whole, "all of it are back", PATIENCE_S)
            fleet.learner.send(Goodbye(reason="all steps done", then="over"))
            assert script.wait(PATIENCE_S) == 0, (tmp_path / "script.log").read_text()
        finally:
            if script.poll() is None:
                script.kill()
                script.wait(PATIENCE_S)
    finally:
        fleet.close()


def of_namespace(host):
    """Return the processes in the network of a host."""

    def network(pid):
        try:
            return os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            return ""

    own = host.run("readlink /proc/self/ns/net").strip()
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if network(path.name) == own]


def supervisors(pids):
    """Return the parents of these processes: the supervisor of the host."""
    return {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
