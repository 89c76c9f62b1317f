"""Fetches the chunks of a version from a host that serves it, over several connections in threads, and resumes."""

import contextlib
import errno
import http.client
import json
import logging
import os
import queue
import random
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from actors.errors import Cancelled, NoRoom, SourceFailed, WrongBytes
from protocol.errors import WeightsError
from protocol.security.http import Access
from protocol.weights.files import FileChunk, chunks, file_chunks, missing, spans
from protocol.weights.format import MAX_MANIFEST_BYTES, Base, Manifest, parse_manifest
from protocol.weights.partial import HeldChunks

log = logging.getLogger(__name__)

CONNECT_S = 5.0
STALL_S = 10.0
"""Longest wait for a byte. Then the source has failed."""
SLOWEST_BYTES_PER_S = 32 * 2**10
"""Slowest pace of a source. A request may take `STALL_S` plus the time of its bytes at this pace."""
PREPARE_S = 300.0
"""Longest time that a source may hash and compare before it sends the manifest."""
POLL_S = 0.2
START_S, HOP_S = 6.0, 3.0
"""Longest time that a relay may take to begin with a version, and what is added for each source behind it.

So those next to a fault act on it first, and those behind them need not leave.
"""
MAX_PAGE_BYTES = 1_000
BUSY_S = 900.0
"""Longest time that a source may answer without a break that enough transfers are going on."""
RETRY_S, SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 0.05, 10.0
"""Wait of a client that a busy source sends away without a number of seconds, and bounds of such a number."""
AWAKE_S = 0.5
"""Time after which a read returns with the bytes that have arrived, so that the caller can stop."""


def retry_s(retry_after: str, luck: float) -> float:
    """Return the seconds after which to ask a busy source again: about what it says, so that not all come at once.

    Args:
        retry_after: the header of that name.
        luck: a random number in [0, 1).

    Example:
        >>> retry_s("2", luck=0.0), retry_s("2", luck=0.5), retry_s("1e9", luck=0.5), retry_s("soon", luck=0.5)
        (1.0, 2.0, 1.0, 1.0)
    """
    # A date is allowed there, too. Nobody's clock is compared with ours.
    said = float(retry_after) if re.fullmatch(r"[0-9]{1,6}", retry_after) else RETRY_S
    return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, said)) * (0.5 + luck)


class _GivenUp(SourceFailed):
    """A connection ends because another one to the same source has failed, which says why."""


class Source:
    """Client of one base URL. It keeps its connection, so each thread needs its own.

    Args:
        url: base URL of the host.
        access: token and certificate of the run.
        cancelled: set when this process ends.
    """

    def __init__(self, url: str, access: Access, cancelled: threading.Event) -> None:
        self.url = url
        self._access, self._cancelled = access, cancelled
        self._connection: http.client.HTTPConnection | None = None

    def manifest(
        self,
        epoch: int,
        version: int,
        base: Base | None,
        behind: int = 0,
        preparing: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Return the manifest of a version, or of a delta from ``base`` if this source can make one.

        Args:
            epoch: epoch of the version.
            version: number of the version.
            base: version that this host has.
            behind: sources that could be asked instead. A relay may take `START_S` and longer to begin.
            preparing: called when the source says that it prepares the answer, which may take `PREPARE_S`.

        Raises:
            SourceFailed: the source cannot be used now.
            WrongBytes: the answer is no valid manifest.
            Cancelled: this process ends.
        """
        path = f"/v1/{epoch}/{version}/manifest{_query(base)}"
        began = heard = time.monotonic()
        while True:
            with self._request(path, {}) as response:
                not_yet = response.status == 404 and "Retry-After" in response.headers
                if not_yet and behind and time.monotonic() - heard > START_S + HOP_S * behind:
                    raise SourceFailed("has not begun with the version")
                if response.status != 202 and not (not_yet and behind):
                    self._expect(response, 200)
                    content = bytearray(self._length(response, MAX_MANIFEST_BYTES))
                    self._fill(self._body(response, len(content)), memoryview(content))
                    break
                response.read()
                if response.status == 202:
                    heard = time.monotonic()
                    preparing()
            if time.monotonic() - began > PREPARE_S:
                raise SourceFailed(f"has prepared the version for more than {PREPARE_S:g} s")
            if self._cancelled.wait(POLL_S):
                raise Cancelled
        try:
            return parse_manifest(bytes(content), self.url)
        except WeightsError as error:
            raise WrongBytes(str(error)) from None

    def pace(self, manifest: Manifest) -> tuple[int, float]:
        """Return the bytes of a version or delta that this source has, and the bytes per second that it got itself.

        Returns:
            Zeros, if it does not say.

        Raises:
            SourceFailed: the source cannot be used now.
        """
        path = f"/v1/{manifest.epoch}/{manifest.version}/held{_query(manifest.base)}"
        with self._request_once(path, {}) as response:
            content = response.read(MAX_PAGE_BYTES)
        try:
            told = json.loads(content)
            return int(told["bytes"]), float(told["come"]) / max(1e-3, float(told["seconds"]))
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            return 0, 0.0

    def read(
        self, manifest: Manifest, span: list[FileChunk], given_up: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[FileChunk, memoryview]]:
        """Yield adjacent chunks with their content, each verified. A view is valid until the next one.

        Args:
            manifest: manifest of the version or delta.
            span: chunks without gaps between them.
            given_up: returns whether nobody wants them any more; asked while nothing comes.

        Raises:
            SourceFailed: the source cannot be used now.
            WrongBytes: the bytes are too few or too many, or do not match their hash.
            Cancelled: this process ends.
        """
        first, last = span[0].offset, span[-1].offset + span[-1].nbytes
        path = f"/v1/{manifest.epoch}/{manifest.version}/data{_query(manifest.base)}"
        with self._request(path, {"Range": f"bytes={first}-{last - 1}"}, given_up) as response:
            self._expect(response, 206)
            if self._length(response, last - first) != last - first:
                raise WrongBytes(f"sent {response.length} bytes where {last - first} were asked for")
            buffer = memoryview(bytearray(max(chunk.nbytes for chunk in span)))
            deadline = time.monotonic() + STALL_S + (last - first) / SLOWEST_BYTES_PER_S
            body = self._body(response, last - first)
            for chunk in span:
                content = buffer[: chunk.nbytes]
                self._fill(body, content, deadline, given_up)
                if not chunk.holds(content):
                    raise WrongBytes(f"bytes {chunk.offset} and on do not match their hash")
                yield chunk, content

    def _body(self, response: http.client.HTTPResponse, nbytes: int) -> "_Body":
        """Return the body of an answer, once its first byte has come."""
        try:
            return _Body(response, self._socket())
        except TimeoutError:
            raise SourceFailed(
                f"answers, but not one of {nbytes:,} bytes behind the answer has come in {STALL_S:g} s: large packets "
                "may be lost on the way; look at the MTU (docs/run/security.md)"
            ) from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _request(
        self, path: str, headers: Mapping[str, str], given_up: Callable[[], bool] = lambda: False
    ) -> Iterator[http.client.HTTPResponse]:
        """Ask, and ask again while the source says that it is busy. Yield its answer.

        Args:
            given_up: returns whether nobody wants the answer any more.
        """
        deadline = time.monotonic() + BUSY_S
        while True:
            with self._request_once(path, headers) as response:
                retry_after = response.headers.get("Retry-After") if response.status == 503 else None
                if retry_after is None:
                    yield response
                    return
                response.read()
            if time.monotonic() > deadline:
                raise SourceFailed(f"has been busy for {BUSY_S:g} s")
            # Invariant: a busy source is no failed one. Another source would be asked by all who wait here.
            if self._cancelled.wait(retry_s(retry_after, random.random())):
                raise Cancelled
            if given_up():
                raise _GivenUp("is busy, and another connection to it has failed")

    @contextmanager
    def _request_once(self, path: str, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        whole = False
        try:
            if self._connection is None:
                self._connection = _connect(self.url, self._access)
            prefix = urlsplit(self.url).path.rstrip("/")
            self._connection.request("GET", prefix + path, headers={**self._access.headers, **headers})
            with self._connection.getresponse() as response:
                yield response
                whole = response.isclosed()
        except (OSError, http.client.HTTPException, ValueError) as error:
            # The URL is invalid, nobody answers, or the answer is not HTTP.
            raise SourceFailed(str(error) or type(error).__name__) from None
        finally:
            # The rest of an unread answer would be taken for the next answer on this connection.
            if not whole:
                self.close()

    def _expect(self, response: http.client.HTTPResponse, status: int) -> None:
        if response.status != status:
            said = response.read(300).decode("utf-8", "replace").strip()
            raise SourceFailed(f"answers {said or f'{response.status} {response.reason}'}")

    def _length(self, response: http.client.HTTPResponse, longest: int) -> int:
        if response.length is None or response.length > longest:
            raise SourceFailed(f"sends {response.length} bytes, {longest} at most were expected")
        return response.length

    def _socket(self) -> socket.socket:
        assert self._connection is not None
        return self._connection.sock

    def _fill(
        self,
        body: "_Body",
        view: memoryview,
        deadline: float = 0.0,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        deadline = deadline or time.monotonic() + STALL_S + len(view) / SLOWEST_BYTES_PER_S
        done = 0
        while done < len(view):
            if self._cancelled.is_set():
                raise Cancelled
            if given_up():
                raise _GivenUp("was given up by another connection")
            if time.monotonic() > deadline:
                raise SourceFailed(f"is slower than {SLOWEST_BYTES_PER_S} bytes/s")
            got = body.readinto(view[done:])
            if got == 0:
                raise SourceFailed(f"ended the transfer {len(view) - done} bytes early")
            done += got or 0


class _Body:
    """Body of a response, in large reads: each read fills the buffer or, under TLS, returns one record.

    After each system call the thread has to wait for the interpreter lock, which the event loop of a sampling
    generator keeps busy. So the bytes bypass Python's own buffers, except those that came with the headers.
    """

    def __init__(self, response: http.client.HTTPResponse, connection: socket.socket) -> None:
        self._response, self._connection = response, connection
        self._ahead = len(response.fp.peek(1)) if response.length else 0
        self._heard = time.monotonic()

    def readinto(self, view: memoryview) -> int | None:
        """Read into ``view``. Return the number of bytes, 0 at the end, or None if nothing came lately.

        Raises:
            TimeoutError: nothing came for `STALL_S`.
        """
        if self._ahead:
            got = self._response.readinto(view[: self._ahead])
            self._ahead -= got
            return got
        received = self._receive(view)
        if received is None:
            if time.monotonic() - self._heard > STALL_S:
                raise TimeoutError("timed out")
            return None
        self._heard = time.monotonic()
        assert self._response.length is not None
        self._response.length -= received
        if not self._response.length:
            # At its end a response closes itself when it is read.
            self._response.read()
        return received

    def _receive(self, view: memoryview) -> int | None:
        secure = isinstance(self._connection, ssl.SSLSocket)
        try:
            if secure:
                self._connection.settimeout(AWAKE_S)
                return self._connection.recv_into(view)
            # With a timeout in Python the socket would not block, so a read would not wait for all bytes.
            self._connection.settimeout(None)
            self._connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", *_timeval(AWAKE_S))
            )
            return self._connection.recv_into(view, len(view), socket.MSG_WAITALL)
        except (BlockingIOError, TimeoutError):
            return None
        finally:
            self._connection.settimeout(STALL_S)


def _timeval(seconds: float) -> tuple[int, int]:
    return int(seconds), int(seconds % 1 * 1e6)


def _connect(url: str, access: Access) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SourceFailed("is no http(s) URL")
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=CONNECT_S, context=access.context
        )
    elif access.context is not None:
        raise SourceFailed("is not encrypted, and this run is: its token is not sent there")
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=CONNECT_S)
    connection.connect()
    connection.sock.settimeout(STALL_S)
    return connection


def _query(base: Base | None) -> str:
    return "" if base is None else f"?base={base.epoch}.{base.version}.{base.root}"


CONNECTIONS = 4
SPAN_CHUNKS = 8
BREAKS = 3
"""Failed transfers in a row after which a fetch ends. Only transfers without a single whole chunk count."""
PAUSE_S = 0.2
BLOCK_BYTES = 512
"""Unit of ``st_blocks``, in which the system counts the memory of a file."""

SLOW_LOOK_S = 3.0
"""Time between two looks at the pace of a source."""
SLOW_SHARE = 0.25
"""A source is slow if it passes bytes on at less than this share of the pace at which it got them itself."""

Connect = Callable[[], Source]


class Patience:
    """Judges whether a source is too slow, where others may be asked.

    A relay that waits for its own source is not slow: only one that has much more than it has sent is.

    Args:
        pace: returns the bytes that the source has, and its own bytes per second; zeros if it does not say.
        now: monotonic seconds.

    Example:
        >>> slow = Patience(lambda: (1_000, 100.0), now=0.0)
        >>> slow.complaint(0, 8, now=1.0), slow.complaint(30, 8, now=4.0)
        ('', '')
        >>> slow.complaint(60, 8, now=8.0)
        'sends 7.5e-06 MB/s of what it got at 0.0001 MB/s'
        >>> waits = Patience(lambda: (66, 100.0), now=0.0)
        >>> waits.complaint(30, 8, now=4.0), waits.complaint(60, 8, now=8.0)
        ('', '')
    """

    def __init__(self, pace: Callable[[], tuple[int, float]], now: float) -> None:
        self._pace, self._looked, self._had = pace, now, -1

    def complaint(self, nbytes: int, ahead: int, now: float) -> str:
        """Return what is wrong with the pace of the source, or "".

        Args:
            nbytes: bytes that are here.
            ahead: bytes that may be under way.
            now: monotonic seconds.
        """
        seconds = now - self._looked
        if seconds < SLOW_LOOK_S:
            return ""
        before, self._had, self._looked = self._had, nbytes, now
        if before < 0:
            return ""
        has, theirs = self._pace()
        ours = (nbytes - before) / seconds
        if has - nbytes <= ahead or ours >= SLOW_SHARE * theirs:
            return ""
        return f"sends {ours / 1e6:.2g} MB/s of what it got at {theirs / 1e6:.2g} MB/s"


def fetch(
    connect: Connect,
    manifest: Manifest,
    path: Path,
    cancelled: threading.Event,
    also: Iterable[tuple[Path, Manifest]] = (),
    *,
    begun: Callable[[], None] = lambda: None,
    behind: int = 0,
) -> int:
    """Fetch the data file or delta of a manifest into ``path``. Keep the valid chunks that the file holds.

    Args:
        connect: opens a connection to the source.
        manifest: manifest of the version or delta.
        path: file to fill.
        cancelled: set when this process ends.
        also: data files and manifests of other versions. Chunks with an equal hash at an equal place, for
            example of frozen parameters, are copied from them.
        begun: called when the map of the chunks lies beside the file, see `protocol.weights.partial`.
        behind: sources that could be asked instead. Without any, a slow source is better than none.

    Returns:
        Bytes that had to be transferred.

    Raises:
        SourceFailed: the source failed. The chunks that came were verified, and stay for the next source.
        NoRoom: this host has no memory for the file.
        Cancelled: this process ends.
    """
    before = path.exists()
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        reserve(file, manifest.transfer_bytes, path)
        wanted = chunks(manifest)
        count = len(wanted)
        if before:
            wanted = missing(file, wanted)
        for other, told in also if wanted else ():
            wanted = _copy_from(other, told, file, wanted)
        total = sum(chunk.nbytes for chunk in wanted)
        held = HeldChunks.begin(path, count, [chunk.offset // manifest.chunk_bytes for chunk in wanted])
        begun()
        breaks = 0
        patience = _patience(connect, manifest) if behind else None
        while wanted:
            arrived: set[int] = set()
            try:
                _transfer(connect, manifest, file, wanted, arrived, cancelled, held, patience)
            except (WrongBytes, _TooSlow):
                raise
            except SourceFailed as error:
                breaks = 0 if arrived else breaks + 1
                if breaks >= BREAKS + behind:
                    raise
                log.info("%s; going on, %d of %d chunks have come", error, len(arrived), len(wanted))
                if cancelled.wait(PAUSE_S):
                    raise Cancelled from None
            wanted = [chunk for chunk in wanted if chunk.offset not in arrived]
        held.end(path)
        return total
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.ftruncate(file, 0)
        raise _no_room(path, manifest.transfer_bytes) from None
    finally:
        os.close(file)


def reserve(file: int, nbytes: int, path: Path) -> None:
    """Set the size of a file, after a check that the file system has room for it.

    The memory is not allocated, because the system would fill it with zeros, which takes half as long as the
    transfer.

    Raises:
        NoRoom: there is too little room.
    """
    room = os.fstatvfs(file)
    needed = nbytes - os.fstat(file).st_blocks * BLOCK_BYTES
    # A file system without a limit reports no blocks.
    if room.f_blocks and needed > room.f_bavail * room.f_frsize:
        os.ftruncate(file, 0)
        raise _no_room(path, nbytes)
    os.ftruncate(file, nbytes)


def _no_room(path: Path, nbytes: int) -> NoRoom:
    return NoRoom(f"{path}: no room for {nbytes} bytes; give the host more shared memory")


def _copy_from(other: Path, told: Manifest, file: int, wanted: list[FileChunk]) -> list[FileChunk]:
    """Copy the chunks that a different version has too. Return the chunks that are still wanted."""
    still, same = [], set(file_chunks(told))
    with contextlib.suppress(OSError), open(other, "rb") as source:
        for chunk in wanted:
            content = os.pread(source.fileno(), chunk.nbytes, chunk.offset) if chunk in same else b""
            if chunk.holds(content):
                os.pwrite(file, content, chunk.offset)
            else:
                still.append(chunk)
        return still
    return wanted


class _TooSlow(SourceFailed):
    """A source passes bytes on much more slowly than it got them, and others may be asked."""


def _patience(connect: Connect, manifest: Manifest) -> Patience:
    """Return the judge of a source's pace, which asks it over a connection of its own."""

    def pace() -> tuple[int, float]:
        source = connect()
        try:
            return source.pace(manifest)
        except SourceFailed:
            return 0, 0.0
        finally:
            source.close()

    return Patience(pace, time.monotonic())


def _transfer(
    connect: Connect,
    manifest: Manifest,
    file: int,
    wanted: list[FileChunk],
    arrived: set[int],
    cancelled: threading.Event,
    held: HeldChunks,
    patience: Patience | None,
) -> None:
    """Fetch all wanted chunks over a few connections, and add the offsets of verified chunks to ``arrived``.

    The first error ends all connections, and so does a source that is too slow.
    """
    # Invariant: each span of chunks belongs to one thread, so no two threads write to the same place. The
    # threads only add to `arrived`, and the caller reads it after they have ended.
    work: queue.SimpleQueue[list[FileChunk]] = queue.SimpleQueue()
    for span in spans(wanted, SPAN_CHUNKS):
        work.put(span)
    failed = threading.Event()

    connections = min(CONNECTIONS, max(1, work.qsize()))
    with ThreadPoolExecutor(connections) as pool:
        runs = [
            pool.submit(_fetch_spans, connect, manifest, file, work, arrived, failed, held)
            for _ in range(connections)
        ]
        slow, step = "", manifest.chunk_bytes
        while patience is not None and not slow and wait(runs, timeout=SLOW_LOOK_S / 3).not_done:
            under_way = 2 * CONNECTIONS * SPAN_CHUNKS * step
            slow = patience.complaint(held.number * step, under_way, time.monotonic())
        if slow:
            failed.set()
    errors = [error for done in runs if (error := done.exception(timeout=0)) is not None]
    if cancelled.is_set():
        raise Cancelled
    if slow and len(arrived) < len(wanted):
        raise _TooSlow(slow)
    # A fault of this host would be met with the next source, too; and the others may only have been given up.
    ranks = (_GivenUp, 3), (WrongBytes, 1), (SourceFailed, 2)
    for error in sorted(errors, key=lambda e: next((rank for kind, rank in ranks if isinstance(e, kind)), 0)):
        raise error


def _fetch_spans(
    connect: Connect,
    manifest: Manifest,
    file: int,
    work: "queue.SimpleQueue[list[FileChunk]]",
    arrived: set[int],
    failed: threading.Event,
    held: HeldChunks,
) -> None:
    """Fetch one span of chunks after the other over a connection, until none is left or a connection has failed."""
    source = connect()
    try:
        while not failed.is_set():
            span = work.get_nowait()
            for chunk, content in source.read(manifest, span, failed.is_set):
                if os.pwrite(file, content, chunk.offset) != chunk.nbytes:
                    raise WeightsError(f"chunk at {chunk.offset} could not be written whole")
                arrived.add(chunk.offset)
                held.arrived(chunk.offset // manifest.chunk_bytes)
                if failed.is_set():
                    return
    except queue.Empty:
        return
    except BaseException:
        failed.set()
        raise
    finally:
        source.close()
