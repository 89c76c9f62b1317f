"""Versions in chunks: each has a hash, so a transfer goes on from the last good one, whatever has happened to it."""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from blake3 import blake3

from protocol.weights.format import DIGEST_BYTES, MAX_CHUNKS, Manifest

CHUNK_BYTES = 2**20
HASH_THREADS = min(4, os.cpu_count() or 1)


class FileChunk(NamedTuple):
    """A stretch of a file and its hash."""

    offset: int
    nbytes: int
    digest: bytes

    def holds(self, content: bytes | bytearray | memoryview) -> bool:
        """Whether this is the chunk's content."""
        return len(content) == self.nbytes and digest(content) == self.digest


def digest(content: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3: twice as fast as SHA-256 where the processor has instructions for that, eight times where not."""
    return blake3(content).digest()


def chunk_size(nbytes: int, least: int = CHUNK_BYTES) -> int:
    """Bytes of the chunks of a file, so that there are not more of them than a manifest may list.

    Example:
        >>> chunk_size(10**9) == 2**20, chunk_size(2**44) == 2**24
        (True, True)
    """
    while nbytes > least * MAX_CHUNKS:
        least *= 2
    return least


def digests(file: int, nbytes: int, chunk_bytes: int) -> bytes:
    """Hash of each chunk of a file descriptor, one behind the other."""

    with _mapped(file) as content, ThreadPoolExecutor(HASH_THREADS) as pool:
        starts = range(0, nbytes, chunk_bytes)
        return b"".join(
            pool.map(lambda start: digest(content[start : min(start + chunk_bytes, nbytes)]), starts)
        )


def chunks(manifest: Manifest) -> list[FileChunk]:
    """Of what is transferred: the data file or a delta."""
    if manifest.encoding == "full":
        return file_chunks(manifest)
    return _cut(manifest.delta_bytes, manifest.chunk_bytes, manifest.delta_chunks)


def file_chunks(manifest: Manifest) -> list[FileChunk]:
    """Of the data file."""
    return _cut(manifest.nbytes, manifest.chunk_bytes, manifest.chunks)


def _cut(size: int, step: int, hashes: bytes) -> list[FileChunk]:
    return [
        FileChunk(offset, min(step, size - offset), hashes[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)])
        for i, offset in enumerate(range(0, size, step))
    ]


def missing(file: int, wanted: Iterable[FileChunk]) -> list[FileChunk]:
    """Chunks that a file does not hold, or holds otherwise. It may have holes, which stay what they are."""
    return _others(lambda chunk: os.pread(file, chunk.nbytes, chunk.offset), wanted)


def damaged(file: int, wanted: Iterable[FileChunk]) -> list[FileChunk]:
    """The same of a file without holes, sooner. It must not be cut meanwhile: that would end the process."""
    with _mapped(file) as content:
        return _others(lambda chunk: content[chunk.offset : chunk.offset + chunk.nbytes], wanted)


def _others(read: Callable[[FileChunk], bytes | memoryview], wanted: Iterable[FileChunk]) -> list[FileChunk]:
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        held = pool.map(lambda chunk: (chunk, chunk.holds(read(chunk))), wanted)
        return [chunk for chunk, whole in held if not whole]


@contextmanager
def _mapped(file: int) -> Iterator[memoryview]:
    """A file's content without a copy, as to make room for one takes as long as to hash it. Fills its holes."""
    if not os.fstat(file).st_size:
        yield memoryview(b"")
        return
    with mmap.mmap(file, 0, prot=mmap.PROT_READ) as memory, memoryview(memory) as content:
        yield content


def spans(wanted: Iterable[FileChunk], longest: int) -> Iterator[list[FileChunk]]:
    """Chunks that follow each other, at most ``longest`` together: what one request asks for.

    Example:
        >>> [[c.offset for c in span] for span in spans([FileChunk(i, 2, b"") for i in (0, 2, 4, 10)], 2)]
        [[0, 2], [4], [10]]
    """
    span: list[FileChunk] = []
    for chunk in wanted:
        if span and (len(span) == longest or span[-1].offset + span[-1].nbytes != chunk.offset):
            yield span
            span = []
        span.append(chunk)
    if span:
        yield span
