"""Versions to serve, servers in threads, and a proxy that damages what passes through it."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from protocol.security.http import scheme
from protocol.weights.files import write_version
from protocol.weights.format import DATA, read_manifest, version_folder
from protocol.weights.server import WeightsServer, serving

RUN = "r"
ELSEWHERE = "another-host"
CHUNK = 64 * 1024
"""Bytes of a chunk with the fixture `small_chunks`."""


def write(
    root: Path,
    version: int,
    *,
    mib: float = 4,
    epoch: int = 1,
    run: str = RUN,
    seed: int = 0,
    step: float = 0.0,
) -> Path:
    """Write a version of random float32 weights; ``step`` is the share of them to change."""
    rng, places = np.random.default_rng(seed), np.random.default_rng(version)
    arrays = {}
    for name in ("a", "b"):
        array = rng.normal(size=int(mib * 2**18 / 2)).astype("<f4")
        if step:
            array[places.random(len(array)) < step] += 1.0
        arrays[name] = array
    return write_version(
        root,
        run=run,
        epoch=epoch,
        version=version,
        shapes={name: ("F32", array.shape) for name, array in arrays.items()},
        tensors=((name, memoryview(array).cast("B")) for name, array in arrays.items()),
    )


def size_of(manifest: Path) -> int:
    return read_manifest(manifest).nbytes


def same(found: Path, source: Path) -> bool:
    return found.with_name(DATA).read_bytes() == source.with_name(DATA).read_bytes()


@contextlib.contextmanager
def server(
    folder: Path, scratch: Path, *, run: str = RUN, keys: Path | None = None, locate=None, **limits
) -> Iterator[str]:
    """Serve a folder of versions from a thread. Yield the URL."""
    url: list[str] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        weights = WeightsServer(
            run, locate or (lambda _, version: version_folder(folder, version)), scratch, keys, **limits
        )
        async with serving(weights, "127.0.0.1", 0) as port:
            url.append(f"{scheme(keys)}://127.0.0.1:{port}")
            ready.set()
            await asyncio.to_thread(stop.wait, 120)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(5)
        yield url[0]
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()


class Proxy:
    """A proxy that passes requests on to a server, and damages the bytes that come back.

    Args:
        cut_after: bytes over all connections after which a connection is cut and the count begins anew.
        cuts: number of cuts; afterwards nothing is cut.
        dies: whether the proxy stops answering after the last cut.
        flip_at: position of the byte to change, counted over all bytes that come back.
        rate: bytes per second.
        silent: whether nothing comes back.
    """

    def __init__(
        self,
        url: str,
        *,
        cut_after: int = 0,
        cuts: int = 1,
        dies: bool = False,
        flip_at: int = -1,
        rate: float = 0.0,
        silent: bool = False,
    ) -> None:
        self._target = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._cut_after, self._cuts, self._dies = cut_after, cuts, dies
        self._flip_at, self._rate, self._silent = flip_at, rate, silent
        self._lock = threading.Lock()
        self.passed = 0
        self.heard = bytearray()  # bytes in both directions
        self._since_cut = 0
        self._stop = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0.05)
        self.url = f"{url.partition(':')[0]}://127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)
        self._listening.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listening.accept()
                if self._dies and self._cuts <= 0:
                    client.close()
                    continue
                client.settimeout(0.05)
                upstream = socket.create_connection(self._target, timeout=0.05)
                for way in (self._request, self._answer):
                    thread = threading.Thread(target=way, args=(client, upstream))
                    self._threads.append(thread)
                    thread.start()

    def _request(self, client: socket.socket, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := self._receive(client)) and not self._stop.is_set():
                self.heard += data
                upstream.sendall(data)

    def _answer(self, client: socket.socket, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError), client, upstream:
            while (data := self._receive(upstream)) and not self._stop.is_set():
                if self._silent:
                    continue
                data, cut = self._spoil(data)
                client.settimeout(5)
                self.heard += data
                client.sendall(data)
                client.settimeout(0.05)
                if self._rate:
                    time.sleep(len(data) / self._rate)
                if cut:
                    return

    def _spoil(self, data: bytes) -> tuple[bytes, bool]:
        with self._lock:
            if self.passed <= self._flip_at < self.passed + len(data):
                place = self._flip_at - self.passed
                data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            self.passed += len(data)
            self._since_cut += len(data)
            if self._cut_after and self._cuts > 0 and self._since_cut >= self._cut_after:
                over = self._since_cut - self._cut_after
                self._cuts -= 1
                self._since_cut = 0
                return data[: len(data) - over], True
        return data, self._dies and self._cuts <= 0

    def _receive(self, side: socket.socket) -> bytes:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                return side.recv(65_536)
        return b""


@contextlib.contextmanager
def proxy(url: str, **faults) -> Iterator[Proxy]:
    passing = Proxy(url, **faults)
    try:
        yield passing
    finally:
        passing.close()
