"""A path that loses large packets, as one with a wrong MTU does: the peer says so, and the broker's status shows it."""

import asyncio
import contextlib
import logging
import socket
import threading
import time

import pytest

from actors.generator.weights import fetch
from launch.processes import free_ports
from protocol.echo import path_trouble
from protocol.messages.episodes import TaskRejected
from protocol.messages.peers import Hello
from protocol.security import key_files
from protocol.security.http import Access
from protocol.session import SHORT_ONLY
from protocol.sockets import AsyncLink
from protocol.weights.files import chunks
from protocol.weights.format import read_manifest
from tests.integration.protocol.encrypted_harness import Broker
from tests.integration.protocol.weights_harness import write

PATIENCE_S = 60.0
LARGEST = 1_300


class Hole:
    """A TCP proxy that passes what is small. A connection on which more comes at once passes nothing any more."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._port, self.open = int(port), False
        self.swallowed = 0
        self._passing = {}

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._taken, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_):
        self._server.close()
        await self.heal()

    async def heal(self):
        """Let everything pass from now on, over new connections."""
        self.open = True
        passing, self._passing = self._passing, {}
        for task, writer in passing.items():
            task.cancel()
            writer.close()
        await asyncio.gather(*passing, return_exceptions=True)

    def _taken(self, reader, writer):
        self._passing[asyncio.create_task(self._pass(reader, writer))] = writer

    async def _pass(self, reader, writer):
        with contextlib.ExitStack() as ends, contextlib.suppress(ConnectionError):
            ends.callback(writer.close)
            up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
            ends.callback(up_writer.close)
            await asyncio.gather(
                self._carry(reader, up_writer, holes=True), self._carry(up_reader, writer, holes=False)
            )

    async def _carry(self, reader, writer, *, holes):
        blocked = False
        while data := await reader.read(65_536):
            # What TCP sends again and again stays lost, and so does all behind it.
            blocked |= holes and not self.open and len(data) > LARGEST
            self.swallowed += blocked
            if not blocked:
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.mark.timeout(120)
def test_a_peer_that_flaps_says_that_large_packets_are_lost_until_they_pass(tmp_path, caplog):
    broker = Broker(None, tmp_path / "broker.log", heartbeat_s=0.3)

    def seen():
        return [line for line in broker.status()["waits"] if line.startswith("a: ") and SHORT_ONLY in line]

    async def main():
        hole = Hole(broker.endpoint)
        async with hole as endpoint:
            # An actor sends its segments again after each join.
            link = AsyncLink(
                endpoint,
                Hello(role="actor", peer="a", incarnation=1),
                lambda *_: None,
                on_join=lambda: link.send(TaskRejected(lease_id="none", reason="x" * 5_000)),
            )
            deadline = time.monotonic() + PATIENCE_S
            while not (lines := await asyncio.to_thread(seen)):
                assert time.monotonic() < deadline, "the status says what is wrong"
                await asyncio.sleep(0.1)
            await hole.heal()
            while link.session.long.trouble or await asyncio.to_thread(seen):
                assert time.monotonic() < deadline, "it is over once large packets pass"
                await asyncio.sleep(0.1)
            await link.close()
        return hole.swallowed, lines

    try:
        with caplog.at_level(logging.ERROR):
            swallowed, (line,) = asyncio.run(main())
    finally:
        broker.stop()
    assert swallowed >= 2
    assert "did not, 2 times in a row: large packets are lost on the way to the broker" in line
    assert "docs/run/security.md" in line
    assert any(SHORT_ONLY in message for message in caplog.messages)


@contextlib.contextmanager
def answers_without_a_body(length):
    """Answer a request with the head of an answer alone. Yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            client, _ = listening.accept()
            with client:
                client.recv(65_536)
                client.sendall(f"HTTP/1.1 206 Partial Content\r\nContent-Length: {length}\r\n\r\n".encode())
                # The client gives up.
                client.recv(65_536)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(PATIENCE_S)


def test_weights_of_which_not_one_byte_comes_behind_the_answer_are_a_matter_of_the_path(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(fetch, "STALL_S", 2.0)
    manifest = read_manifest(write(tmp_path, 7, mib=1))
    span = chunks(manifest)
    with answers_without_a_body(manifest.nbytes) as url:
        source = fetch.Source(url, Access(), threading.Event())
        with contextlib.closing(source), pytest.raises(fetch.SourceFailed) as failed:
            list(source.read(manifest, span))
    assert f"not one of {manifest.nbytes:,} bytes behind the answer" in str(failed.value)
    assert "look at the MTU" in str(failed.value)


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broker")
    key_files.make(folder / "keys")
    key_files.make(folder / "keys", ["host-far"])
    running = Broker(folder / "keys", folder / "broker.log")
    yield running
    running.stop()


def test_a_path_is_tried_before_anything_is_started(broker, tmp_path):
    bundle = tmp_path / "bundle"
    key_files.bundle(broker.keys, "host-far", bundle)

    async def tried():
        hole = Hole(broker.endpoint)
        async with hole as endpoint:
            blocked = await asyncio.to_thread(path_trouble, endpoint, bundle, "actor-far-0", long_s=1.0)
            await hole.heal()
            free = await asyncio.to_thread(path_trouble, endpoint, bundle, "actor-far-0")
        return blocked, free

    blocked, free = asyncio.run(tried())
    assert blocked.startswith(
        "short messages pass, one of 65,536 bytes did not come back from tcp://127.0.0.1:"
    )
    assert "MTU" in blocked
    assert free == ""
    assert broker.peers() == set(), "nobody has joined for it"


def test_a_broker_that_is_not_there_is_no_matter_of_the_path(tmp_path):
    (port,) = free_ports(1)
    assert path_trouble(f"tcp://127.0.0.1:{port}", None, "actor-far-0", first_s=0.3) == ""
