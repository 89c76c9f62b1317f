"""Versions as files: written in hashed chunks, verified byte by byte, and as differences from earlier ones."""

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from protocol.errors import WeightsError
from protocol.weights.format import (
    DATA,
    DIGEST_BYTES,
    MANIFEST,
    MAX_CHUNKS,
    Manifest,
    Shapes,
    Stamp,
    TensorSpec,
    host_id,
    layout,
    root_hash,
    verify_shapes,
    version_folder,
)

CHUNK_BYTES = 2**20
HASH_THREADS = min(4, os.cpu_count() or 1)


class FileChunk(NamedTuple):
    """A range of a file and the hash of its content."""

    offset: int
    nbytes: int
    digest: bytes

    def holds(self, content: bytes | bytearray | memoryview) -> bool:
        """Return whether this is the content of the chunk."""
        return len(content) == self.nbytes and digest(content) == self.digest


def digest(content: bytes | bytearray | memoryview) -> bytes:
    """Return the BLAKE3 hash of some content.

    BLAKE3 is twice as fast as SHA-256 on a processor with SHA instructions, and eight times as fast without.
    """
    return blake3(content).digest()


def chunk_size(nbytes: int, least: int = CHUNK_BYTES) -> int:
    """Return the chunk size for a file, large enough that a manifest may list all chunks.

    Example:
        >>> chunk_size(10**9) == 2**20, chunk_size(2**44) == 2**24
        (True, True)
    """
    while nbytes > least * MAX_CHUNKS:
        least *= 2
    return least


def digests(file: int, nbytes: int, chunk_bytes: int) -> bytes:
    """Return the hashes of all chunks of an open file, concatenated."""
    with _mapped(file) as content, ThreadPoolExecutor(HASH_THREADS) as pool:
        starts = range(0, nbytes, chunk_bytes)
        return b"".join(
            pool.map(lambda start: digest(content[start : min(start + chunk_bytes, nbytes)]), starts)
        )


def chunks(manifest: Manifest) -> list[FileChunk]:
    """Return the chunks to transfer: of the data file, or of the delta."""
    if manifest.encoding == "full":
        return file_chunks(manifest)
    return _cut_into_chunks(manifest.delta_bytes, manifest.chunk_bytes, manifest.delta_chunks)


def file_chunks(manifest: Manifest) -> list[FileChunk]:
    """Return the chunks of the data file."""
    return _cut_into_chunks(manifest.nbytes, manifest.chunk_bytes, manifest.chunks)


def _cut_into_chunks(size: int, step: int, hashes: bytes) -> list[FileChunk]:
    return [
        FileChunk(offset, min(step, size - offset), hashes[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)])
        for i, offset in enumerate(range(0, size, step))
    ]


def missing(file: int, wanted: Iterable[FileChunk]) -> list[FileChunk]:
    """Return the chunks that a file lacks or has with different content, without filling its holes."""
    return _not_held(lambda chunk: os.pread(file, chunk.nbytes, chunk.offset), wanted)


def damaged(file: int, wanted: Iterable[FileChunk]) -> list[FileChunk]:
    """Return the same chunks as `missing`, faster, for a file without holes.

    The file must not be truncated meanwhile, because that would end the process (SIGBUS).
    """
    with _mapped(file) as content:
        return _not_held(lambda chunk: content[chunk.offset : chunk.offset + chunk.nbytes], wanted)


def _not_held(
    read: Callable[[FileChunk], bytes | memoryview], wanted: Iterable[FileChunk]
) -> list[FileChunk]:
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        held = pool.map(lambda chunk: (chunk, chunk.holds(read(chunk))), wanted)
        return [chunk for chunk, whole in held if not whole]


@contextmanager
def _mapped(file: int) -> Iterator[memoryview]:
    """Map a file, which fills its holes. Making room for a copy would take as long as hashing it."""
    if not os.fstat(file).st_size:
        yield memoryview(b"")
        return
    with mmap.mmap(file, 0, prot=mmap.PROT_READ) as memory, memoryview(memory) as content:
        yield content


def spans(wanted: Iterable[FileChunk], longest: int) -> Iterator[list[FileChunk]]:
    """Join adjacent chunks, at most ``longest`` of them, into spans that one request asks for.

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


LEVEL = 1
THREADS = min(4, os.cpu_count() or 1)
BLOCK_BYTES = 4 * 2**20
MAX_WINDOW_BYTES = 2**27
"""Upper limit of the memory that a zstd frame may ask for when it is decompressed."""
SAMPLES, SAMPLE_BYTES = 16, 2**16
"""Number and bytes of the samples that are compressed first, to find out whether a delta is worthwhile."""
LARGEST_SHARE = 0.3
"""Largest size of a delta, as a share of the full version.

A larger delta saves less time than making and applying it takes, even at 1 Gbit/s.
"""


def make_delta(base: int, new: int, nbytes: int, out: int, *, largest: int) -> int | None:
    """Write the delta between two files of ``nbytes`` each; all files are given as descriptors.

    Returns:
        The bytes written, or None if the delta is larger than ``largest``, or would be by the sample.
    """
    if nbytes > 4 * SAMPLES * SAMPLE_BYTES and _sampled(base, new, nbytes) * nbytes > largest:
        return None
    compressor = zstandard.ZstdCompressor(level=LEVEL, threads=THREADS).compressobj(size=nbytes)
    written = 0
    for offset in range(0, nbytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, nbytes - offset)
        written += _write_exactly(
            out,
            compressor.compress((_read_exactly(base, size, offset) ^ _read_exactly(new, size, offset)).data),
        )
        if written > largest:
            return None
    written += _write_exactly(out, compressor.flush())
    return written if written <= largest else None


def _sampled(base: int, new: int, nbytes: int) -> float:
    """Return the compressed size of a sample of the difference, as a share of its size."""
    step = nbytes // SAMPLES
    pieces = [
        _read_exactly(base, SAMPLE_BYTES, offset) ^ _read_exactly(new, SAMPLE_BYTES, offset)
        for offset in range(0, step * SAMPLES, step)
    ]
    sample = np.concatenate(pieces).data
    return len(zstandard.ZstdCompressor(level=LEVEL).compress(sample)) / len(sample)


def apply_delta(delta: int, base: int, out: int, nbytes: int) -> None:
    """Apply a delta to ``base`` and write the resulting file to ``out``; all files are given as descriptors.

    Raises:
        WeightsError: the delta is unreadable, or was made for files of a different size.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        with (
            open(delta, "rb", closefd=False) as source,
            decompressor.stream_reader(source, read_across_frames=False, closefd=False) as reader,
        ):
            offset = 0
            while offset < nbytes:
                piece = np.frombuffer(reader.read(min(BLOCK_BYTES, nbytes - offset)), np.uint8)
                if not len(piece):
                    raise WeightsError(f"the delta ends after {offset} of {nbytes} bytes")
                _write_exactly(out, (piece ^ _read_exactly(base, len(piece), offset)).data)
                offset += len(piece)
            if reader.read(1):
                raise WeightsError(f"the delta has more than {nbytes} bytes")
    except zstandard.ZstdError as error:
        raise WeightsError(f"the delta cannot be decompressed: {error}") from None


def _read_exactly(file: int, size: int, offset: int) -> NDArray[np.uint8]:
    content = os.pread(file, size, offset)
    if len(content) != size:
        raise WeightsError(
            f"the base ends at byte {offset + len(content)}; {size} from {offset} on were needed"
        )
    return np.frombuffer(content, np.uint8)


def _write_exactly(file: int, content: bytes | memoryview) -> int:
    view = memoryview(content)
    done = 0
    while done < len(view):
        done += os.write(file, view[done:])
    return done


HASHED_TOGETHER_BYTES = 4 * 2**20
"""Bytes that a thread hashes at a time."""


class PreallocatedFile:
    """A folder with a data file of ``nbytes`` that is allocated and mapped into this process.

    Raises:
        OSError: there is no room for it. Filling the file later never fails for lack of room.
    """

    def __init__(self, root: Path, nbytes: int) -> None:
        self.folder, self.nbytes = Path(tempfile.mkdtemp(prefix="blank-", dir=root)), nbytes
        try:
            with open(self.folder / DATA, "w+b", buffering=0) as file:
                # Lack of room is an exception here; in a write through the map it would be a fatal signal.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                self._memory = mmap.mmap(file.fileno(), nbytes)
        except OSError:
            self.discard()
            raise
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)

    def touch(self) -> None:
        """Make the system find and zero the memory now, which takes longer than filling it.

        Call it while other work goes on.
        """
        self._bytes[:: mmap.PAGESIZE] = 0

    @property
    def memory(self) -> memoryview:
        """The bytes of the file, which may be written until the version is finished."""
        return memoryview(self._memory)

    def discard(self) -> None:
        """Remove the folder; the file will not be used."""
        shutil.rmtree(self.folder, ignore_errors=True)


class BackgroundHashes:
    """Hashes of every ``step`` bytes of some memory, computed by threads as soon as the bytes are written."""

    def __init__(self, content: memoryview, step: int) -> None:
        self._content, self._step = content, step
        self._together = max(step, HASHED_TOGETHER_BYTES // step * step)
        # Invariant: one thread at a time writes the memory and calls `written`; the pool reads written ranges only.
        self._hashing = list[Future[bytes]]()
        self._pool = ThreadPoolExecutor(HASH_THREADS, "hashing")

    def written(self, nbytes: int) -> None:
        """Hash what is complete now that the first ``nbytes`` bytes are written."""
        whole = nbytes if nbytes == len(self._content) else nbytes - self._together + 1
        for first in range(len(self._hashing) * self._together, whole, self._together):
            self._hashing.append(self._pool.submit(self._hash, first))

    def finished_hashes(self) -> bytes:
        """Finish hashing the memory, which is written by now. Return the hashes of its chunks in order."""
        self.written(len(self._content))
        try:
            return b"".join(future.result() for future in self._hashing)
        finally:
            self.stop()

    def stop(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _hash(self, first: int) -> bytes:
        content = self._content[first : first + self._together]
        return b"".join(digest(content[i : i + self._step]) for i in range(0, len(content), self._step))


NAMED = 3
"""Upper limit of the tensors that an error names."""


class NewVersion:
    """A version that is being written. No reader sees any of it before `finish` has renamed its folder.

    Attributes:
        places: the tensors with their places in the file, in the order of the shapes.
        memory: bytes of the file, to which the owner copies the tensors.

    Args:
        root: folder of the versions.
        shapes: dtype and shape of each tensor by name.
        preallocated: data file made ahead below ``root``. Without one of the right size, it is allocated now.

    Raises:
        OSError: there is no room for the version.
    """

    def __init__(self, root: Path, shapes: Shapes, preallocated: PreallocatedFile | None = None) -> None:
        header, self.places = layout(shapes)
        self.nbytes = len(header) + sum(place.nbytes for place in self.places)
        if preallocated is None or preallocated.nbytes != self.nbytes:
            if preallocated is not None:
                preallocated.discard()
            root.mkdir(parents=True, exist_ok=True)
            preallocated = PreallocatedFile(root, self.nbytes)
        self._root, self._file = root, preallocated
        self._step = chunk_size(self.nbytes, CHUNK_BYTES)
        self.memory = preallocated.memory
        self._hashes = BackgroundHashes(self.memory, self._step)
        self.memory[: len(header)] = header
        self.written(len(header))

    def written(self, nbytes: int) -> None:
        """Note that the first ``nbytes`` bytes of the file are complete, so that threads may hash them."""
        self._hashes.written(nbytes)

    def finish(self, *, run: str, epoch: int, version: int) -> tuple[Path, Manifest]:
        """Wait for the hashes, write the manifest, and rename the folder. Every tensor has to be in its place.

        Returns:
            The path of the manifest, and the manifest.

        Raises:
            OSError: the manifest cannot be written, for example for lack of room.
        """
        hashes, folder = self._hashes.finished_hashes(), self._file.folder
        manifest = Manifest(
            run=run,
            epoch=epoch,
            version=version,
            nbytes=self.nbytes,
            tensors=self.places,
            root=root_hash(self.places, self._step, hashes),
            chunk_bytes=self._step,
            chunks=hashes,
            host=host_id(),
            stamp=_stamped(folder / DATA),
        )
        (folder / MANIFEST).write_bytes(msgspec.msgpack.encode(manifest))
        final = version_folder(self._root, version)
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
        return final / MANIFEST, manifest

    def discard(self) -> None:
        """Remove what was written; the version will not be finished."""
        self._hashes.stop()
        self._file.discard()


def write_version(
    root: Path,
    *,
    run: str,
    epoch: int,
    version: int,
    shapes: Shapes,
    tensors: Iterable[tuple[str, memoryview]],
    preallocated: PreallocatedFile | None = None,
) -> Path:
    """Write one version, with tensors in the order of ``shapes``, and return the path of its manifest.

    Args:
        tensors: names and bytes; each memoryview need only be valid until the next is taken.
        preallocated: data file made ahead below ``root``. Without one of the right size, it is allocated now.

    Raises:
        WeightsError: the tensors do not match ``shapes``.
        OSError: the version cannot be written, for example for lack of room.
    """
    new = NewVersion(root, shapes, preallocated)
    try:
        for place, (name, data) in zip(new.places, tensors, strict=True):
            check_place(place, name, data.nbytes)
            end = place.offset + place.nbytes
            if data.nbytes:
                new.memory[place.offset : end] = data.cast("B")
            new.written(end)
        return new.finish(run=run, epoch=epoch, version=version)[0]
    except BaseException:
        new.discard()
        raise


def check_place(place: TensorSpec, name: str, nbytes: int) -> None:
    """Check that a tensor is the one that belongs to a place.

    Raises:
        WeightsError: it has a different name or size.
    """
    if name != place.name or nbytes != place.nbytes:
        raise WeightsError(f"expected {place.name} of {place.nbytes} bytes, got {name} of {nbytes}")


def _stamped(data: Path) -> Stamp:
    """Set a precise modification time and return the stamp; the system sets it in steps of milliseconds."""
    now = time.time_ns()
    os.utime(data, ns=(now, now))
    return _stamp(data.stat())


def _stamp(found: os.stat_result) -> Stamp:
    return Stamp(found.st_dev, found.st_ino, found.st_mtime_ns)


def untouched(manifest: Manifest, data: IO[bytes]) -> bool:
    """Return whether a file is the one written with its manifest, on this host, and is unchanged since.

    Hashing its bytes would prove no more, because the hashes were made of the same memory. A write through a
    memory map is not detected; no code here maps a data file for writing once it has a manifest.
    """
    return manifest.host == host_id() and manifest.stamp == _stamp(os.fstat(data.fileno()))


def verify(manifest: Manifest, data: IO[bytes], expected: Shapes) -> None:
    """Check names, dtypes, shapes, sizes and hashes before anything is loaded.

    Args:
        data: the opened data file.
        expected: ``name -> (dtype, shape)`` of the model in service.

    Raises:
        WeightsError: the text names the first difference.
    """
    verify_shapes(manifest, expected)
    verify_bytes(manifest, data)


def verify_bytes(manifest: Manifest, data: IO[bytes]) -> None:
    """Check that a file is the data file of a version, byte by byte.

    Raises:
        WeightsError: the text names the first difference.
    """
    verify_header(manifest, data)
    for chunk in damaged(data.fileno(), file_chunks(manifest)):
        raise WeightsError(
            f"version {manifest.version}: bytes of {_owners(manifest, chunk)} do not match their hash "
            f"({chunk.nbytes} bytes from {chunk.offset} on)"
        )


def verify_header(manifest: Manifest, data: IO[bytes]) -> None:
    """Check that size and header of a file are right for the version.

    Raises:
        WeightsError: the text says which of them differs.
    """
    which = f"version {manifest.version}"
    size = os.fstat(data.fileno()).st_size
    if size != manifest.nbytes:
        raise WeightsError(f"{which}: file has {size} bytes, the manifest says {manifest.nbytes}")
    header, _ = layout({t.name: (t.dtype, tuple(t.shape)) for t in manifest.tensors})
    if os.pread(data.fileno(), len(header), 0) != header:
        raise WeightsError(f"{which}: the header of the file does not match the tensors of the manifest")


def _owners(manifest: Manifest, chunk: FileChunk) -> str:
    """Return the names of the tensors that have bytes in a chunk."""
    end = chunk.offset + chunk.nbytes
    names = [t.name for t in manifest.tensors if t.offset < end and t.offset + t.nbytes > chunk.offset]
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
