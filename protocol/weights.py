"""Weights on disk or in shared memory: an ordinary safetensors file beside a manifest that proves it whole.

A version lives in its own folder ``v00000017`` with ``model.safetensors`` and ``manifest.msgpack``. It is
written under another name and renamed when complete, and nothing in it is changed afterwards, so a reader
sees all of a version or nothing. The manifest lists every tensor with dtype, shape, place and SHA-256.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

MANIFEST = "manifest.msgpack"
DATA = "model.safetensors"
SAFETENSORS_DTYPES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}


class WeightsError(ValueError):
    """Weights that must not be loaded; the text names the tensor, what was expected and what was found."""


class TensorSpec(Struct, frozen=True):
    """One tensor of a version: safetensors dtype name, shape, absolute place in the data file, hash."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int
    sha256: str = ""


class Manifest(Struct, frozen=True, kw_only=True):
    """What a version consists of. ``root`` is the hash over all tensors' names, dtypes, shapes and hashes."""

    run: str
    epoch: int
    version: int
    nbytes: int
    tensors: list[TensorSpec]
    root: str


def layout(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, list[TensorSpec]]:
    """Header bytes of a safetensors file and the place of each tensor, for ``name -> (dtype, shape)``."""
    entries: dict[str, dict[str, object]] = {}
    sizes: dict[str, int] = {}
    position = 0
    for name, (dtype, shape) in shapes.items():
        nbytes = SAFETENSORS_DTYPES[dtype]
        for extent in shape:
            nbytes *= extent
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        sizes[name] = nbytes
        position += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    specs, position = [], len(header)
    for name, (dtype, shape) in shapes.items():
        specs.append(TensorSpec(name, dtype, list(shape), position, sizes[name]))
        position += sizes[name]
    return header, specs


def root_hash(tensors: Iterable[TensorSpec]) -> str:
    """SHA-256 over the tensors' descriptions and hashes, in order."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(json.dumps([t.name, t.dtype, t.shape, t.nbytes, t.sha256]).encode())
    return digest.hexdigest()


def version_folder(root: Path, version: int) -> Path:
    """Folder of a version below ``root``.

    Example:
        >>> version_folder(Path("/dev/shm/run"), 17).name
        'v00000017'
    """
    return root / f"v{version:08d}"


def write_version(
    root: Path,
    *,
    run: str,
    epoch: int,
    version: int,
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    tensors: Iterable[tuple[str, memoryview]],
) -> Path:
    """Write one version, tensors in the order of ``shapes``; returns the path of its manifest.

    Raises:
        WeightsError: the tensors do not match the shapes announced.
    """
    final = version_folder(root, version)
    partial = final.with_name(final.name + f".partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    header, places = layout(shapes)
    specs: list[TensorSpec] = []
    with open(partial / DATA, "wb") as out:
        out.write(header)
        for place, (name, data) in zip(places, tensors, strict=True):
            if name != place.name or data.nbytes != place.nbytes:
                raise WeightsError(
                    f"expected {place.name} of {place.nbytes} bytes, got {name} of {data.nbytes}"
                )
            out.write(data)
            specs.append(msgspec.structs.replace(place, sha256=hashlib.sha256(data).hexdigest()))
        nbytes = out.tell()
    manifest = Manifest(
        run=run, epoch=epoch, version=version, nbytes=nbytes, tensors=specs, root=root_hash(specs)
    )
    (partial / MANIFEST).write_bytes(msgspec.msgpack.encode(manifest))
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    return final / MANIFEST


def read_manifest(path: Path) -> Manifest:
    """Manifest of a version; raises WeightsError when it is unreadable or contradicts itself."""
    try:
        manifest = msgspec.msgpack.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(f"{path}: {error}") from None
    if root_hash(manifest.tensors) != manifest.root:
        raise WeightsError(f"{path}: root hash does not match the tensors listed; the manifest was altered")
    return manifest


def verify(manifest: Manifest, data: IO[bytes], expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Check names, dtypes, shapes, sizes and hashes before anything is loaded.

    Args:
        data: the opened data file; read once, from start to end.
        expected: ``name -> (dtype, shape)`` of the model in service.

    Raises:
        WeightsError: naming the first difference.
    """
    found = {t.name: t for t in manifest.tensors}
    which = f"version {manifest.version}"
    if missing := sorted(expected.keys() - found.keys()):
        raise WeightsError(f"{which}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if unknown := sorted(found.keys() - expected.keys()):
        raise WeightsError(f"{which}: tensor {unknown[0]} is not part of the model in service")
    size = os.fstat(data.fileno()).st_size
    if size != manifest.nbytes:
        raise WeightsError(f"{which}: file has {size} bytes, the manifest says {manifest.nbytes}")
    for t in manifest.tensors:
        if (t.dtype, tuple(t.shape)) != expected[t.name]:
            raise WeightsError(
                f"{which}: {t.name} is {t.dtype} {t.shape}, the model in service has {expected[t.name]}"
            )
        data.seek(t.offset)
        if hashlib.sha256(data.read(t.nbytes)).hexdigest() != t.sha256:
            raise WeightsError(f"{which}: bytes of {t.name} do not match their hash")


def read_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """``name -> (dtype, shape)`` from the header of a safetensors file."""
    with open(path, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        if size > 100 * 1024 * 1024:
            raise WeightsError(f"{path}: header of {size} bytes; this is not a safetensors file")
        entries = json.loads(f.read(size))
    return {name: (e["dtype"], tuple(e["shape"])) for name, e in entries.items() if name != "__metadata__"}


def retire(root: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` versions; readers that hold a file open are not disturbed."""
    folders = sorted(p for p in root.glob("v*") if p.name[1:].isdigit())
    for folder in folders[: max(0, len(folders) - keep)]:
        shutil.rmtree(folder, ignore_errors=True)
