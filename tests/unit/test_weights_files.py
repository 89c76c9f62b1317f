"""Versions larger than one chunk: hashes are made while the file is written, and name what was damaged."""

import os

import numpy as np
import pytest

import protocol.weights_files
from protocol.weights import DATA, WeightsError, read_manifest
from protocol.weights_chunks import digests, file_chunks
from protocol.weights_files import verify_bytes, write_version

SHAPES = {
    "first": ("F32", (700,)),
    "empty": ("F32", (0,)),
    "second": ("F32", (1_900,)),
    "third": ("U8", (11,)),
}


@pytest.fixture
def manifest_path(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol.weights_files, "CHUNK_BYTES", 1_024)
    monkeypatch.setattr(protocol.weights_files, "WRITE_BYTES", 1_500)
    rng = np.random.default_rng(0)
    sizes = {"first": 2_800, "empty": 0, "second": 7_600, "third": 11}
    tensors = ((name, memoryview(rng.bytes(size))) for name, size in sizes.items())
    return write_version(tmp_path, run="r", epoch=1, version=3, shapes=SHAPES, tensors=tensors)


def test_chunks_are_those_of_the_file_as_it_lies_there(manifest_path):
    manifest = read_manifest(manifest_path)
    with open(manifest_path.with_name(DATA), "rb") as file:
        assert manifest.chunks == digests(file.fileno(), manifest.nbytes, 1_024)
        verify_bytes(manifest, file)
    cut = file_chunks(manifest)
    assert sum(chunk.nbytes for chunk in cut) == manifest.nbytes
    assert len(cut) == -(-manifest.nbytes // 1_024)


@pytest.mark.parametrize(
    ("name", "others"), [("first", ["third"]), ("second", ["first"]), ("third", ["first"])]
)
def test_damage_is_found_where_it_is(manifest_path, name, others):
    manifest = read_manifest(manifest_path)
    place = next(t.offset + t.nbytes - 1 for t in manifest.tensors if t.name == name)
    with open(manifest_path.with_name(DATA), "r+b") as file:
        byte = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), place)
        with pytest.raises(WeightsError, match=f"version 3: bytes of .*{name}") as caught:
            verify_bytes(manifest, file)
    assert not [other for other in others if other in str(caught.value)]


def test_of_many_tensors_in_a_chunk_a_few_are_named(tmp_path):
    shapes = {f"t{i}": ("U8", (1,)) for i in range(9)}
    tensors = ((name, memoryview(b"x")) for name in shapes)
    path = write_version(tmp_path, run="r", epoch=1, version=3, shapes=shapes, tensors=tensors)
    with open(path.with_name(DATA), "r+b") as file:
        os.pwrite(file.fileno(), b"y", read_manifest(path).nbytes - 1)
        with pytest.raises(WeightsError, match="bytes of t0, t1, t2 and 6 more do not match"):
            verify_bytes(read_manifest(path), file)
