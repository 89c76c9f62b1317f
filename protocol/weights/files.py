"""Write versions in the format of `protocol.weights.format`, and verify files byte by byte."""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from protocol.errors import WeightsError
from protocol.weights.chunks import CHUNK_BYTES, FileChunk, chunk_size, damaged, file_chunks
from protocol.weights.format import (
    DATA,
    MANIFEST,
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
from protocol.weights.preallocated import PreallocatedFile

NAMED = 3
"""Upper limit of the tensors that an error names."""


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
        preallocated: data file made ahead below ``root``. Without one of the right size, it is allocated now.

    Raises:
        WeightsError: the tensors do not match ``shapes``.
        OSError: the version cannot be written, for example for lack of room.
    """
    header, specs = layout(shapes)
    nbytes = len(header) + sum(spec.nbytes for spec in specs)
    step = chunk_size(nbytes, CHUNK_BYTES)
    if preallocated is None or preallocated.nbytes != nbytes:
        if preallocated is not None:
            preallocated.discard()
        root.mkdir(parents=True, exist_ok=True)
        preallocated = PreallocatedFile(root, nbytes)
    try:
        hashes = preallocated.fill(_pieces(header, specs, tensors), step)
        manifest = Manifest(
            run=run,
            epoch=epoch,
            version=version,
            nbytes=nbytes,
            tensors=specs,
            root=root_hash(specs, step, hashes),
            chunk_bytes=step,
            chunks=hashes,
            host=host_id(),
            stamp=_stamped(preallocated.folder / DATA),
        )
        (preallocated.folder / MANIFEST).write_bytes(msgspec.msgpack.encode(manifest))
        final = version_folder(root, version)
        shutil.rmtree(final, ignore_errors=True)
        preallocated.folder.rename(final)
    except BaseException:
        preallocated.discard()
        raise
    return final / MANIFEST


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


def _pieces(
    header: bytes, specs: Iterable[TensorSpec], tensors: Iterable[tuple[str, memoryview]]
) -> Iterator[memoryview]:
    yield memoryview(header)
    for spec, (name, data) in zip(specs, tensors, strict=True):
        if name != spec.name or data.nbytes != spec.nbytes:
            raise WeightsError(f"expected {spec.name} of {spec.nbytes} bytes, got {name} of {data.nbytes}")
        if data.nbytes:
            yield data.cast("B")


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
