"""A connection that faults can tamper with: an actor of the run talks to the broker through a TCP proxy."""

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.system import System

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
