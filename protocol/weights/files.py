"""Write versions in the format of `protocol.weights.format`, and verify files byte by byte."""

import os
import shutil
import time
from collections.abc import Iterable
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
from protocol.weights.preallocated import BackgroundHashes, PreallocatedFile

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
        hashes, folder = self._hashes.joined(), self._file.folder
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
