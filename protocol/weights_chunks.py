"""Versions in chunks: each has a hash, so a transfer goes on from the last good one, whatever has happened to it."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from protocol.weights import DIGEST_BYTES, Manifest

CHUNK_BYTES = 2**20
HASH_THREADS = min(4, os.cpu_count() or 1)


class Chunk(NamedTuple):
    """A stretch of a file and its SHA-256."""

    offset: int
    nbytes: int
    digest: bytes

    def holds(self, content: bytes | bytearray | memoryview) -> bool:
        """Whether this is the chunk's content."""
        return len(content) == self.nbytes and hashlib.sha256(content).digest() == self.digest


def digests(file: int, nbytes: int, chunk_bytes: int) -> bytes:
    """SHA-256 of each chunk of a file descriptor, one behind the other."""

    def digest(offset: int) -> bytes:
        return hashlib.sha256(os.pread(file, min(chunk_bytes, nbytes - offset), offset)).digest()

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return b"".join(pool.map(digest, range(0, nbytes, chunk_bytes)))


def chunks(manifest: Manifest) -> list[Chunk]:
    """Of what is transferred."""
    size, step = manifest.transfer_bytes, manifest.chunk_bytes
    return [
        Chunk(offset, min(step, size - offset), manifest.chunks[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)])
        for i, offset in enumerate(range(0, size, step) if step else ())
    ]


def missing(file: int, wanted: Iterable[Chunk]) -> list[Chunk]:
    """Chunks that a file does not hold, or holds otherwise."""
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        held = pool.map(
            lambda chunk: (chunk, chunk.holds(os.pread(file, chunk.nbytes, chunk.offset))), wanted
        )
        return [chunk for chunk, whole in held if not whole]


def spans(wanted: Iterable[Chunk], longest: int) -> Iterator[list[Chunk]]:
    """Chunks that follow each other, at most ``longest`` together: what one request asks for.

    Example:
        >>> [[c.offset for c in span] for span in spans([Chunk(i, 2, b"") for i in (0, 2, 4, 10)], 2)]
        [[0, 2], [4], [10]]
    """
    span: list[Chunk] = []
    for chunk in wanted:
        if span and (len(span) == longest or span[-1].offset + span[-1].nbytes != chunk.offset):
            yield span
            span = []
        span.append(chunk)
    if span:
        yield span
