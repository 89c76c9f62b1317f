"""A wire that can be tampered with: an actor of the run talks to the broker through a proxy of TCP connections."""

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
    """Passes bytes on, one thread for each direction of each connection.

    ``mangle`` sees all that passes, as it was read; ``delay_s`` holds up every read.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.mangle: Mangle = bytes
        self.only_back = False
        """Whether it sees only what comes from the server."""
        self.delay_s = 0.0
        self.recorded = b""
        """What the newest client has sent, from its first byte on."""
        self.connections = 0
        self._target = target
        self._open: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self) -> None:
        """Reset all connections; those that come are let in."""
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let nobody in any more."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
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
        """One connection, to its end."""
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
    """Flips one bit in some of the reads.

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
    """Now and then the two halves of a read change places: all bytes arrive, in another order."""

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
        """Start the actor, or start it again if it has ended: it is under no supervisor."""
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
            Deadlock: it does not.
        """
        self.start()

        def there() -> bool:
            peers = (self._system.status() or {"peers": []})["peers"]
            return any(p["name"] == NAME and p["silent_s"] < 1.0 for p in peers)

        self._system.until(there, BACK_S, f"{NAME}, behind a proxy, is there")

    # --- what happens to it -------------------------------------------------------------------------------

    def mangled(self, mangle: "Flips | Swaps", seconds: float) -> None:
        """For a while, bytes are not what was sent."""
        self.is_back()
        self.proxy.mangle = mangle
        try:
            time.sleep(seconds)
        finally:
            self.proxy.mangle = bytes
        assert mangle.count, "nothing passed that could be tampered with"
        self.is_back()

    def reset(self, times: int) -> None:
        """Connections are reset, again and again."""
        self.is_back()
        before = self.proxy.connections
        for _ in range(times):
            self.proxy.cut()
            time.sleep(0.5)
        self.is_back()
        assert self.proxy.connections > before, "no connection was there to be reset"

    def slow(self, delay_s: float, seconds: float) -> None:
        """Every read is held up."""
        self.is_back()
        self.proxy.delay_s = delay_s
        try:
            time.sleep(seconds)
        finally:
            self.proxy.delay_s = 0.0
        self.is_back()

    def replay(self, times: int) -> None:
        """All that the actor has sent on its connection is sent again, byte for byte, on others."""
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
    """Segments stored, and segments that were known when they came."""
    ledger = (system.status() or {})["ledger"]
    return int(ledger["stored"]["segments"]), int(ledger["duplicate_segments"])


def run_folder_with(system: System, endpoint: str) -> Path:
    """A folder like the run's, for a process that is to find the broker at another address."""
    folder = system.dir / "wire" / system.folder.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = system.config
    config["broker"]["endpoint"] = endpoint
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "keys").symlink_to(system.folder / "keys")
    return folder
