"""Versions larger than one chunk are hashed while the file is written; the hashes name what was damaged."""

import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

import protocol.weights.files
from protocol.errors import WeightsError
from protocol.weights.files import (
    BackgroundHashes,
    PreallocatedFile,
    digest,
    digests,
    file_chunks,
    untouched,
    verify_bytes,
    write_version,
)
from protocol.weights.format import DATA, read_manifest

SHAPES = {
    "first": ("F32", (700,)),
    "empty": ("F32", (0,)),
    "second": ("F32", (1_900,)),
    "third": ("U8", (11,)),
}


@pytest.fixture
def manifest_path(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol.weights.files, "CHUNK_BYTES", 1_024)
    # Two chunks are hashed at a time.
    monkeypatch.setattr(protocol.weights.files, "HASHED_TOGETHER_BYTES", 2_500)
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


def version_of(root, number, preallocated=None, values=(1.0, 2.0)):
    data = memoryview(np.array(values, dtype="<f4")).cast("B")
    shapes = {"a": ("F32", (len(values),))}
    return write_version(
        root,
        run="r",
        epoch=1,
        version=number,
        shapes=shapes,
        tensors=[("a", data)],
        preallocated=preallocated,
    )


def test_a_version_written_into_room_made_ahead_is_the_same(tmp_path):
    plain = version_of(tmp_path, 1)
    nbytes = read_manifest(plain).nbytes
    blank = PreallocatedFile(tmp_path, nbytes)
    blank.touch()
    ahead = version_of(tmp_path, 2, blank)
    assert read_manifest(ahead).root == read_manifest(plain).root
    assert ahead.with_name(DATA).read_bytes() == plain.with_name(DATA).read_bytes()
    assert not blank.folder.exists()


def test_room_of_another_size_is_given_back(tmp_path):
    other = PreallocatedFile(tmp_path, 5_000)
    path = version_of(tmp_path, 1, other)
    with open(path.with_name(DATA), "rb") as file:
        verify_bytes(read_manifest(path), file)
    assert [p.name for p in tmp_path.iterdir()] == [path.parent.name]


def test_tensors_that_do_not_match_leave_nothing(tmp_path):
    wrong = [("b", memoryview(bytes(8)))]
    with pytest.raises(WeightsError, match="expected a of 8 bytes, got b of 8"):
        write_version(tmp_path, run="r", epoch=1, version=1, shapes={"a": ("F32", (2,))}, tensors=wrong)
    assert list(tmp_path.iterdir()) == []


def test_want_of_room_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match=r"No space left|too large"):
        PreallocatedFile(tmp_path, 2**60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [256, 1_000, 4_096, 10_000])
def test_hashes_are_of_every_step_whatever_the_pieces(monkeypatch, step):
    monkeypatch.setattr(protocol.weights.files, "HASHED_TOGETHER_BYTES", 1_000)
    content = np.random.default_rng(1).bytes(9_001)
    hashes = BackgroundHashes(memoryview(content), step)
    for written in (1, 4_500, 4_501):
        hashes.written(written)
    found = hashes.finished_hashes()
    assert found == b"".join(digest(content[i : i + step]) for i in range(0, len(content), step))


def link(data: Path) -> Path:
    other = data.with_name("linked")
    other.hardlink_to(data)
    return other


def rename(data: Path) -> Path:
    return data.parent.rename(data.parent.with_name("renamed")) / DATA


def write_the_same(data: Path) -> Path:
    with open(data, "r+b") as file:
        file.write(os.pread(file.fileno(), 1, 0))
    return data


def copy(data: Path) -> Path:
    # copy2 copies the file's time, too.
    return Path(shutil.copy2(data, data.with_name("copied")))


def put_another_there(data: Path) -> Path:
    return copy(data).rename(data)


@pytest.mark.parametrize(
    ("happens", "still"),
    [(link, True), (rename, True), (write_the_same, False), (copy, False), (put_another_there, False)],
)
def test_a_file_is_known_until_somebody_writes_or_it_is_another(manifest_path, happens, still):
    manifest = read_manifest(manifest_path)
    with open(happens(manifest_path.with_name(DATA)), "rb") as file:
        assert untouched(manifest, file) == still


@pytest.mark.parametrize("change", [{"host": "another"}, {"stamp": None}])
def test_of_another_host_or_unmarked_no_file_is_known(manifest_path, change):
    manifest = read_manifest(manifest_path)
    with open(manifest_path.with_name(DATA), "rb") as file:
        assert untouched(manifest, file)
        assert not untouched(msgspec.structs.replace(manifest, **change), file)
