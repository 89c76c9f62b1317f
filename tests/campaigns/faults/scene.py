"""Everything that a fault may touch: the run that is broken, and a connection to tamper with.

The run is `offbeat train` in its own folder, watched from outside. The connection is that of an actor of the run, which
talks to the broker through a TCP proxy.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import NoAnswer
from launch.processes import families
from launch.supervise.broker_status import fetch

SETTINGS = Path(__file__).with_name("faults.toml")
START_S = 600.0
POLL_S = 0.1
FRESH_S = 1.5
"""Seconds after which a silent peer does not count as up: three heartbeats."""


class Deadlock(AssertionError):
    """The run did not go on within its deadline."""


class System:
    """A run, its supervisor, and the broker's `/status`.

    Args:
        dir: folder below which the run folder is made. It is a tmpfs if the campaign fills disks.
        overrides: overrides of the run file.
        environment: environment variables of all processes.
    """

    def __init__(self, dir: Path, overrides: list[str], environment: dict[str, str]) -> None:
        self.dir, self.folder = dir, dir / "faults"
        self._overrides, self._environment = overrides, environment
        self.supervisor: subprocess.Popen[bytes] | None = None

    def start(self, *, resume: bool = False, back_to: int | None = None) -> "subprocess.Popen[bytes]":
        """Start the supervisor, which starts all other processes.

        Args:
            resume: go on with the run.
            back_to: learner step of the checkpoint to go back to.
        """
        options = ["--resume"] if resume else []
        options += ["--from", str(back_to)] if back_to is not None else []
        command = [sys.executable, "-m", "launch.cli", "train", str(SETTINGS), f"run.dir={self.dir}"]
        with open(self.dir / "train.log", "ab") as log:
            self.supervisor = subprocess.Popen(
                [*command, *self._overrides, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OFFBEAT_LOG_LEVEL": "debug", **self._environment},
            )
        return self.supervisor

    def end(self) -> int:
        """Ask the run to end in order. Return its exit code."""
        assert self.supervisor is not None
        self.supervisor.send_signal(signal.SIGINT)
        return self.supervisor.wait(180.0)

    @property
    def config(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return loaded

    def status(self) -> dict[str, Any] | None:
        """Return the broker's status, or None if it does not answer."""
        try:
            return fetch(self.config["broker"]["http"], keys=self.folder / "keys")
        except (NoAnswer, OSError, ValueError, KeyError):
            return None

    def pid(self, name: str) -> int:
        """Return the process id of a role's process, as the supervisor knows it."""
        state = json.loads((self.folder / "supervisor.json").read_text())
        return int(state["processes"][name]["pid"])

    def descendants(self, name: str) -> list[int]:
        """Return the descendants of a role's process. The one with the most processor time comes first."""
        head = self.pid(name)
        family = families([head])[head]
        return sorted((pid for pid in family if pid != head), key=lambda pid: -family[pid].cpu_s)

    def committed(self) -> int | None:
        """Return the segments ever committed as trained, later roll-backs included, or None if unknown.

        The number grows with each learner step.
        """
        status = self.status()
        if status is None:
            return None
        ledger = status["ledger"]
        return int(ledger["outcomes"]["trained"]["segments"] + ledger["rolled_back"]["segments"])

    def well(self, *, generators: int = 1) -> bool:
        """Return whether the broker answers, has just heard all actors and the learner, and has generators.

        The process ids of the learner and the actors must be those that the supervisor knows.

        Args:
            generators: how many generators the broker has to offer. A killed generator comes back slowly,
                because vLLM takes long to start, and the run does not wait for it as long as another one is
                up.
        """
        status = self.status()
        if status is None:
            return False
        peers = {peer["name"]: peer for peer in status["peers"] if peer["silent_s"] < FRESH_S}
        names = {name for name in self.names() if name == "learner" or name.startswith("actor")}
        return (
            names <= peers.keys()
            and all(peers[name]["pid"] == self.pid(name) for name in names)
            and len(status["generators_offered"]) >= generators
        )

    def names(self) -> list[str]:
        """Return the names of all processes under the supervisor."""
        return list(json.loads((self.folder / "supervisor.json").read_text())["processes"])

    def generators(self) -> list[str]:
        """Return the names of the generators that the broker currently offers to actors."""
        return sorted((self.status() or {"generators_offered": []})["generators_offered"])

    def goes_on(self, deadline_s: float) -> None:
        """Wait until all roles are there and a further learner step is committed.

        Raises:
            Deadlock: either wait took longer than the deadline, or the supervisor has ended.
        """
        self.until(self.well, deadline_s, "all roles are there")
        before = self.committed() or 0
        self.until(lambda: (self.committed() or 0) > before, deadline_s, "a further step is committed")

    def until(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Wait until ``condition`` holds.

        Raises:
            Deadlock: it did not hold within the deadline, or the supervisor has ended.
        """
        assert self.supervisor is not None
        deadline = time.monotonic() + deadline_s
        while not condition():
            if self.supervisor.poll() is not None:
                raise Deadlock(f"the supervisor ended with {self.supervisor.returncode} while: {what}")
            if time.monotonic() > deadline:
                raise Deadlock(
                    f"not within {deadline_s:g} s: {what}; status: {json.dumps(self.status())[:4000]}"
                )
            time.sleep(POLL_S)


def alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


NAME = "actor-wire"
PIECE = 65_536
RECORDED_BYTES = 1 << 20
BACK_S = 30.0

Mangle = Callable[[bytes], bytes]


class Proxy:
    """A proxy that passes bytes on, with one thread per direction of each connection.

    ``mangle`` transforms each read before it is sent on. ``delay_s`` delays each read.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.mangle: Mangle = bytes
        self.only_back = False
        """True if ``mangle`` gets only the bytes that come from the server."""
        self.delay_s = 0.0
        self.recorded = b""
        """Bytes that the newest client has sent, from its first byte on; about `RECORDED_BYTES` at most."""
        self.connections = 0
        self._target = target
        self._open: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self) -> None:
        """Reset all connections. New connections are still accepted."""
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept no more connections, and reset the open ones."""
        with contextlib.suppress(OSError):
            # This wakes the thread that accepts.
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection(self._target, timeout=5.0)
            except OSError:
                client.close()
                continue
            broker.settimeout(None)
            self.connections += 1
            self.recorded = b""
            threading.Thread(target=self._serve, args=(client, broker), name="proxy", daemon=True).start()

    def _serve(self, client: socket.socket, broker: socket.socket) -> None:
        """Serve one connection until it ends."""
        with client, broker:
            self._open |= {client, broker}
            back = threading.Thread(target=self._pump, args=(broker, client, False), daemon=True)
            back.start()
            self._pump(client, broker, True)
            back.join()
            self._open -= {client, broker}

    def _pump(self, source: socket.socket, sink: socket.socket, forth: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                if self.delay_s:
                    time.sleep(self.delay_s)
                if forth and len(self.recorded) < RECORDED_BYTES:
                    self.recorded += data
                sink.sendall(data if forth and self.only_back else self.mangle(data))
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class Flips:
    """A ``mangle`` function that flips one bit in some of the reads.

    Example:
        >>> flips = Flips(random.Random(0), share=1.0)
        >>> a, b = bytes(8), flips(bytes(8))
        >>> sum((x ^ y).bit_count() for x, y in zip(a, b)), flips.count
        (1, 1)
    """

    def __init__(self, rng: random.Random, share: float) -> None:
        self._rng, self._share, self.count = rng, share, 0

    def __call__(self, data: bytes) -> bytes:
        if self._rng.random() >= self._share:
            return data
        self.count += 1
        changed = bytearray(data)
        changed[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)


class Swaps:
    """A ``mangle`` function that swaps the halves of some reads: all bytes arrive, in a different order."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self._rng, self._share, self.count = rng, share, 0

    def __call__(self, data: bytes) -> bytes:
        if len(data) < 2 or self._rng.random() >= self._share:
            return data
        self.count += 1
        return data[len(data) // 2 :] + data[: len(data) // 2]


class Wire:
    """The proxy, and the actor behind it."""

    def __init__(self, system: System) -> None:
        self._system = system
        host, _, port = str(system.config["broker"]["endpoint"]).removeprefix("tcp://").rpartition(":")
        self.broker = host, int(port)
        self.proxy = Proxy(self.broker)
        self._actor: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the actor if it does not run. No supervisor does that for it."""
        if self._actor is not None and self._actor.poll() is None:
            return
        folder = run_folder_with(self._system, self.proxy.endpoint)
        with open(self._system.folder / "logs" / f"{NAME}.log", "ab") as log:
            self._actor = subprocess.Popen(
                [sys.executable, "-m", "launch.role", "actor", str(folder), "--name", NAME],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OFFBEAT_LOG_LEVEL": "debug", "OMP_NUM_THREADS": "1"},
            )

    def close(self) -> None:
        if self._actor is not None and self._actor.poll() is None:
            self._actor.kill()
            self._actor.wait()
        self.proxy.close()

    def is_back(self) -> None:
        """Wait until the broker hears the actor.

        Raises:
            Deadlock: the broker does not hear the actor within `BACK_S`.
        """
        self.start()

        def there() -> bool:
            peers = (self._system.status() or {"peers": []})["peers"]
            return any(p["name"] == NAME and p["silent_s"] < 1.0 for p in peers)

        self._system.until(there, BACK_S, f"{NAME}, behind a proxy, is there")

    # --- what happens to it -------------------------------------------------------------------------------

    def mangled(self, mangle: "Flips | Swaps", seconds: float) -> None:
        """Change passing bytes for a while."""
        self.is_back()
        self.proxy.mangle = mangle
        try:
            time.sleep(seconds)
        finally:
            self.proxy.mangle = bytes
        assert mangle.count, "nothing passed that could be tampered with"
        self.is_back()

    def reset(self, times: int) -> None:
        """Reset all connections several times."""
        self.is_back()
        before = self.proxy.connections
        for _ in range(times):
            self.proxy.cut()
            time.sleep(0.5)
        self.is_back()
        assert self.proxy.connections > before, "no connection was there to be reset"

    def slow(self, delay_s: float, seconds: float) -> None:
        """Delay every read for a while."""
        self.is_back()
        self.proxy.delay_s = delay_s
        try:
            time.sleep(seconds)
        finally:
            self.proxy.delay_s = 0.0
        self.is_back()

    def replay(self, times: int) -> None:
        """Send the recorded bytes of the actor's connection again on new connections, byte for byte."""
        self.is_back()
        before = _stored(self._system)
        recorded = self.proxy.recorded
        assert recorded, "nothing was recorded"
        for _ in range(times):
            with socket.create_connection(self.broker, timeout=5.0) as raw, contextlib.suppress(OSError):
                raw.sendall(recorded)
                raw.settimeout(0.5)
                while raw.recv(PIECE):
                    pass
        self.is_back()
        after = _stored(self._system)
        assert after[1] == before[1], (
            f"{after[1] - before[1]} segments came again and were taken for known ones"
        )


def _stored(system: System) -> tuple[int, int]:
    """Return the number of stored segments, and of segments that were known already when they came."""
    ledger = (system.status() or {})["ledger"]
    return int(ledger["stored"]["segments"]), int(ledger["duplicate_segments"])


def run_folder_with(system: System, endpoint: str) -> Path:
    """Make a run folder for a process that has to reach the broker at another address. Return its path."""
    folder = system.dir / "wire" / system.folder.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = system.config
    config["broker"]["endpoint"] = endpoint
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "keys").symlink_to(system.folder / "keys")
    return folder


@dataclass
class Scene:
    """Everything that a fault may touch."""

    system: System
    rng: random.Random
    clock: Path
    """File with the number of seconds by which the processes' wall clocks are off."""
    wire: Wire | None = None
    """Connection to tamper with. None if the campaign has no faults that need it."""

    def name(self, role: str) -> str:
        """Return the name of a process of this role; for generators, of one that is not restarting."""
        if role == "generator":
            return self.rng.choice(self.system.generators() or ["generator-0"])
        return role if role in ("broker", "learner") else f"{role}-{self.rng.randrange(2)}"


Fault = Callable[[Scene], float | None]
"""Function that breaks something, and repairs what the system cannot repair itself.

It returns the moment from which the recovery time counts. None means the moment at which it returns.
"""
