"""Hosts that are namespaces of this machine: each has its own network, name, shared memory and boot id."""

import os
import shlex
import signal
import subprocess
import uuid
from pathlib import Path

PATIENCE_S = 90.0
ALONE = ["unshare", "--net", "--mount", "--uts"]


def why_not() -> str:
    """Return why this machine cannot make namespaces, or ""."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        # A dummy link stays in the new namespace and ends with it.
        probe = "ip link add probe type veth peer name other && mount -t tmpfs none /dev/shm"
        done = subprocess.run([*ALONE, "sh", "-c", probe], capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    return done.stderr.strip() if done.returncode else ""


class Host:
    """A host with one address, whose processes run in its folder. It lives as long as its anchor process."""

    def __init__(self, name: str, address: str, folder: Path, programs: Path) -> None:
        self.name, self.address, self.folder, self._programs = name, address, folder, programs
        folder.mkdir()
        boot_id = folder.with_suffix(".boot-id")
        boot_id.write_text(f"{uuid.uuid4()}\n")
        own = (
            f"hostname {name} && mount -t tmpfs -o size=512m none /dev/shm && "
            f"mount --bind {shlex.quote(str(boot_id))} /proc/sys/kernel/random/boot_id && ip link set lo up && "
            "echo up && exec sleep infinity"
        )
        self._anchor = subprocess.Popen([*ALONE, "sh", "-c", own], stdout=subprocess.PIPE, text=True)
        assert self._anchor.stdout is not None
        assert self._anchor.stdout.readline() == "up\n", f"host {name} could not be made"
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def connect(self, other: "Host") -> None:
        """Lay a wire to another host, and give both ends their address."""
        ours, theirs = str(self._anchor.pid), str(other._anchor.pid)
        lay = f"ip link add eth0 type veth peer name eth0 netns {theirs}"
        subprocess.run(["nsenter", "-n", "-t", ours, "sh", "-c", lay], check=True, timeout=PATIENCE_S)
        for host in (self, other):
            host.run(f"ip addr add {host.address}/24 dev eth0 && ip link set eth0 up")

    def plug_in(self, bridge: str, port: str) -> None:
        """Lay a wire from a port of a bridge, which is in the caller's own network, to this host."""
        pid = str(self._anchor.pid)
        lay = f"ip link add {port} type veth peer name eth0 netns {pid} && ip link set {port} master {bridge} up"
        subprocess.run(["sh", "-c", lay], check=True, timeout=PATIENCE_S)
        self.run(f"ip addr add {self.address}/24 dev eth0 && ip link set eth0 up")

    def run(self, script: str, timeout_s: float = PATIENCE_S) -> str:
        """Run a script in the host's folder. Return what it wrote to standard output."""
        command = self.command(f"set -e\n{script}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=self._env())
        assert done.returncode == 0, f"{self.name}: {script}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def start(self, line: str) -> None:
        """Start a command line as in a terminal of its own; its name is the role, the log is beside the folder."""
        role = line.split()[1]
        with open(self.log(role), "wb") as log:
            self.started[role] = subprocess.Popen(
                self.command(f"exec {line}"), stdout=log, stderr=subprocess.STDOUT, env=self._env()
            )

    def log(self, role: str) -> Path:
        return self.folder.parent / f"{role}.log"

    def end(self, *roles: str) -> dict[str, int]:
        """Send SIGTERM to all of these roles at once. Return their exit codes."""
        for role in roles:
            self.started[role].send_signal(signal.SIGTERM)
        return {role: self.started[role].wait(PATIENCE_S) for role in roles}

    def close(self) -> None:
        """Kill what still runs. The namespaces and the wire end with the last process."""
        for process in [*self.started.values(), self._anchor]:
            if process.poll() is None:
                process.kill()
                process.wait(PATIENCE_S)
        assert self._anchor.stdout is not None
        self._anchor.stdout.close()

    def command(self, script: str) -> list[str]:
        """Return the command that runs a script of the shell in this host's folder."""
        # The folder is entered inside: a folder of the mount namespace before allows no rename between folders.
        enter = ["nsenter", "-n", "-m", "-u", "-t", str(self._anchor.pid)]
        return [*enter, "sh", "-c", f"cd {shlex.quote(str(self.folder))}\n{script}"]

    def _env(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self._programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
