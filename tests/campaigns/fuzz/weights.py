"""Fuzz the readers of weights: a manifest, data file or delta must be whole, or raise WeightsError.

An input is one byte for the kind, and the bytes to read.
"""

import os
import random
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import WeightsError
from protocol.weights.files import apply_delta, chunks, digests, make_delta, spans, verify, write_version
from protocol.weights.format import (
    DATA,
    MAX_MANIFEST_BYTES,
    Base,
    Manifest,
    layout,
    parse_manifest,
    read_manifest,
    read_shapes,
    root_hash,
)
from tests.campaigns.fuzz.engine import mutate_bytes, mutate_value

SHAPES = {"a": ("BF16", (4, 6)), "b.weight": ("F32", (5,)), "c": ("U8", ()), "d": ("BOOL", (0, 3))}
CHUNK_BYTES = 64
MANIFEST_KIND, DATA_KIND, DELTA_KIND, SHAPES_KIND, FILE_KIND = range(5)
ROOM_BYTES = 1 << 20
SHARED_MEMORY = Path("/dev/shm")


class ManifestTarget:
    """Target for `protocol.weights.format` (manifest and data file) and `protocol.weights.files`."""

    name, unit = "manifest", "accepted"

    def __init__(self) -> None:
        self.done = 0
        where = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self._root = Path(tempfile.mkdtemp(prefix="fuzz-weights-", dir=where))
        weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        self._new, self._old = (self._write(version, bytes([fill]) * 8) for version, fill in ((1, 7), (2, 9)))
        self._data = (self._new.parent / DATA).read_bytes()
        self._manifest = parse_manifest(self._new.read_bytes(), "sample")
        self._fds = {
            name: os.open(self._root / name, os.O_RDWR | os.O_CREAT) for name in ("data", "delta", "out")
        }
        self._base = os.open(self._old.parent / DATA, os.O_RDONLY)
        new = os.open(self._new.parent / DATA, os.O_RDONLY)
        nbytes = self._manifest.nbytes
        size = make_delta(self._base, new, nbytes, self._fds["delta"], largest=ROOM_BYTES)
        assert size is not None
        self._delta = os.pread(self._fds["delta"], size, 0)
        hashes = digests(new, nbytes, CHUNK_BYTES)
        os.close(new)
        root = root_hash(self._manifest.tensors, CHUNK_BYTES, hashes)
        full = msgspec.structs.replace(self._manifest, chunk_bytes=CHUNK_BYTES, chunks=hashes, root=root)
        told = {"encoding": "xor-zstd", "base": Base(1, 0, "0" * 64), "delta_bytes": size}
        delta = msgspec.structs.replace(full, delta_chunks=hashes[: 32 * -(-size // CHUNK_BYTES)], **told)
        self._manifests = [msgspec.msgpack.encode(m) for m in (self._manifest, full, delta)]

    def make(self, rng: random.Random) -> bytes:
        kind = rng.choice((MANIFEST_KIND,) * 5 + (DATA_KIND, DELTA_KIND, DELTA_KIND, SHAPES_KIND, FILE_KIND))
        match kind:
            case 0 | 4:
                data = self._make_manifest(rng)
            case 1 | 3:
                data = mutate_bytes(rng, self._data)
            case _:
                data = (
                    rng.randbytes(rng.getrandbits(6))
                    if not rng.getrandbits(3)
                    else mutate_bytes(rng, self._delta)
                )
        return bytes([kind]) + data

    def run(self, data: bytes) -> None:
        kind, content = data[0] % 5 if data else 0, data[1:]
        try:
            match kind:
                case 0:
                    self._check_manifest(parse_manifest(content, "input"))
                case 1:
                    self._put("data", content)
                    with open(self._fds["data"], "rb", closefd=False) as file:
                        verify(self._manifest, file, SHAPES)
                    assert content == self._data, "another file than was written is whole"
                case 2:
                    self._check_delta(content)
                case 3:
                    self._put("data", content)
                    read_shapes(self._root / "data")
                case _:
                    (self._root / "manifest").write_bytes(content)
                    self._check_manifest(read_manifest(self._root / "manifest"))
        except WeightsError:
            return
        self.done += 1

    def _make_manifest(self, rng: random.Random) -> bytes:
        sample = rng.choice(self._manifests)
        if not rng.getrandbits(2):
            return mutate_bytes(rng, sample)
        tree: Any = mutate_value(rng.choice, msgspec.msgpack.decode(sample))
        # Compute the right root hash, as an attacker who knows the format would.
        if isinstance(tree, dict) and rng.getrandbits(2):
            try:
                listed = msgspec.convert(tree.get("tensors"), Manifest.__annotations__["tensors"])
                chunk_bytes: Any = tree.get("chunk_bytes")
                chunks: Any = tree.get("chunks")
                tree["root"] = root_hash(listed, chunk_bytes, chunks)
            except (msgspec.MsgspecError, TypeError):
                tree["root"] = "0" * 64
        try:
            return msgspec.msgpack.encode(tree)
        except (OverflowError, RecursionError):
            return sample[:-1]

    def _check_manifest(self, manifest: Manifest) -> None:
        """Use an accepted manifest as a reader does: nothing may fail, or ask for bytes outside the file."""
        assert len(msgspec.msgpack.encode(manifest)) <= MAX_MANIFEST_BYTES, (
            "a manifest longer than manifests are"
        )
        header, _ = layout({t.name: (t.dtype, tuple(t.shape)) for t in manifest.tensors})
        places = sorted((t.offset, t.offset + t.nbytes) for t in manifest.tensors if t.nbytes)
        ends = [len(header), *(end for _, end in places)]
        assert all(start >= end for (start, _), end in zip(places, ends, strict=False)), "tensors overlap"
        assert ends[-1] <= manifest.nbytes, "a tensor ends behind the file"
        wanted = chunks(manifest)
        assert sum(chunk.nbytes for chunk in wanted) in (0, manifest.transfer_bytes), (
            "chunks are not the file"
        )
        assert all(span for span in spans(wanted, 4)), "an empty span"
        (self._root / "data").write_bytes(self._data)
        with open(self._root / "data", "rb") as file:
            try:
                verify(manifest, file, SHAPES)
            except WeightsError:
                return
        assert manifest.tensors == self._manifest.tensors, "a manifest of another file fits"

    def _check_delta(self, content: bytes) -> None:
        self._put("delta", content)
        self._put("out", b"")
        nbytes = self._manifest.nbytes
        try:
            os.lseek(self._fds["delta"], 0, os.SEEK_SET)
            apply_delta(self._fds["delta"], self._base, self._fds["out"], nbytes)
        finally:
            assert os.fstat(self._fds["out"]).st_size <= nbytes, "a delta writes more than the file has"
        assert os.fstat(self._fds["out"]).st_size == nbytes, "a delta makes less than the file"

    def _put(self, name: str, content: bytes) -> None:
        fd = self._fds[name]
        os.ftruncate(fd, 0)
        os.pwrite(fd, content, 0)
        os.lseek(fd, 0, os.SEEK_SET)

    def _write(self, version: int, fill: bytes) -> Path:
        sizes = {name: len(fill) for name in SHAPES} | {"a": 48, "b.weight": 20, "c": 1, "d": 0}
        tensors = [(name, memoryview((fill * 8)[: sizes[name]])) for name in SHAPES]
        return write_version(self._root, run="r", epoch=1, version=version, shapes=SHAPES, tensors=tensors)
