"""Fetches the chunks of a version from one source into a file, over several connections, and resumes."""

import contextlib
import errno
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from actors.errors import Cancelled, NoRoom, SourceFailed, WrongBytes
from actors.generator.weights.source import Source
from protocol.errors import WeightsError
from protocol.weights.chunks import FileChunk, chunks, file_chunks, missing, spans
from protocol.weights.format import Manifest

log = logging.getLogger(__name__)

CONNECTIONS = 4
SPAN_CHUNKS = 8
BREAKS = 3
"""Failed transfers in a row after which a fetch ends. Only transfers without a single whole chunk count."""
PAUSE_S = 0.2
BLOCK_BYTES = 512
"""Unit of ``st_blocks``, in which the system counts the memory of a file."""

Connect = Callable[[], Source]


def fetch(
    connect: Connect,
    manifest: Manifest,
    path: Path,
    cancelled: threading.Event,
    also: Iterable[tuple[Path, Manifest]] = (),
) -> int:
    """Fetch the data file or delta of a manifest into ``path``. Keep the valid chunks that the file holds.

    Args:
        connect: opens a connection to the source.
        manifest: manifest of the version or delta.
        path: file to fill.
        cancelled: set when this process ends.
        also: data files and manifests of other versions. Chunks with an equal hash at an equal place, for
            example of frozen parameters, are copied from them.

    Returns:
        Bytes that had to be transferred.

    Raises:
        SourceFailed: the source failed. The chunks that came were verified, and stay for the next source.
        NoRoom: this host has no memory for the file.
        Cancelled: this process ends.
    """
    begun = path.exists()
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        reserve(file, manifest.transfer_bytes, path)
        wanted = chunks(manifest)
        if begun:
            wanted = missing(file, wanted)
        for other, told in also if wanted else ():
            wanted = _copy_from(other, told, file, wanted)
        total = sum(chunk.nbytes for chunk in wanted)
        breaks = 0
        while wanted:
            arrived: set[int] = set()
            try:
                _transfer(connect, manifest, file, wanted, arrived, cancelled)
            except WrongBytes:
                raise
            except SourceFailed as error:
                breaks = 0 if arrived else breaks + 1
                if breaks == BREAKS:
                    raise
                log.info("%s; going on, %d of %d chunks have come", error, len(arrived), len(wanted))
                if cancelled.wait(PAUSE_S):
                    raise Cancelled from None
            wanted = [chunk for chunk in wanted if chunk.offset not in arrived]
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


def _transfer(
    connect: Connect,
    manifest: Manifest,
    file: int,
    wanted: list[FileChunk],
    arrived: set[int],
    cancelled: threading.Event,
) -> None:
    """Fetch all wanted chunks over a few connections, and add the offsets of verified chunks to ``arrived``.

    The first error ends all connections.
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
            pool.submit(_fetch_spans, connect, manifest, file, work, arrived, failed)
            for _ in range(connections)
        ]
    errors = [error for done in runs if (error := done.exception(timeout=0)) is not None]
    if cancelled.is_set():
        raise Cancelled
    for error in sorted(errors, key=lambda error: not isinstance(error, WrongBytes)):
        raise error


def _fetch_spans(
    connect: Connect,
    manifest: Manifest,
    file: int,
    work: "queue.SimpleQueue[list[FileChunk]]",
    arrived: set[int],
    failed: threading.Event,
) -> None:
    """Fetch one span of chunks after the other over a connection, until none is left or a connection has failed."""
    source = connect()
    try:
        while not failed.is_set():
            span = work.get_nowait()
            for chunk, content in source.read(manifest, span):
                if os.pwrite(file, content, chunk.offset) != chunk.nbytes:
                    raise WeightsError(f"chunk at {chunk.offset} could not be written whole")
                arrived.add(chunk.offset)
                if failed.is_set():
                    return
    except queue.Empty:
        return
    except BaseException:
        failed.set()
        raise
    finally:
        source.close()
