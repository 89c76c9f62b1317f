"""Weights on disk are an ordinary safetensors file, which is whole or not there."""

import json

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from protocol.errors import WeightsError
from protocol.weights.files import verify, write_version
from protocol.weights.format import (
    DATA,
    MANIFEST,
    Manifest,
    layout,
    read_manifest,
    read_shapes,
    retire,
    root_hash,
    version_folder,
)

SHAPES = {"a.weight": ("F32", (2, 3)), "b.bias": ("F32", (5,)), "half": ("F16", (1,))}


def tensors():
    rng = np.random.default_rng(0)
    kinds = {"F32": "<f4", "F16": "<f2"}
    return {name: rng.normal(size=shape).astype(kinds[dtype]) for name, (dtype, shape) in SHAPES.items()}


def write(root, version=1, shapes=SHAPES, arrays=None):
    arrays = tensors() if arrays is None else arrays
    pieces = [(name, memoryview(array.tobytes())) for name, array in arrays.items()]
    return write_version(root, run="r", epoch=2, version=version, shapes=shapes, tensors=pieces)


def check(path, expected=SHAPES):
    with open(path.with_name(DATA), "rb") as data:
        verify(read_manifest(path), data, expected)


def test_the_file_is_safetensors_as_others_read_it(tmp_path):
    path = write(tmp_path)
    loaded = load_file(path.with_name(DATA))
    for name, array in tensors().items():
        np.testing.assert_array_equal(loaded[name], array)
    assert read_shapes(path.with_name(DATA)) == SHAPES


def test_what_was_written_is_verified(tmp_path):
    path = write(tmp_path, version=17)
    manifest = read_manifest(path)
    assert (manifest.run, manifest.epoch, manifest.version) == ("r", 2, 17)
    assert path.parent == version_folder(tmp_path, 17)
    assert path.name == MANIFEST
    assert manifest.nbytes == path.with_name(DATA).stat().st_size
    assert manifest.root == root_hash(manifest.tensors, manifest.chunk_bytes, manifest.chunks)
    check(path)


def test_nothing_unfinished_is_left_behind_and_a_version_can_be_written_again(tmp_path):
    write(tmp_path)
    write(tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["v00000001"]


def test_every_flipped_byte_of_the_data_is_found(tmp_path):
    path = write(tmp_path)
    manifest = read_manifest(path)
    data = path.with_name(DATA)
    good = data.read_bytes()
    for spec in manifest.tensors:
        for place in (spec.offset, spec.offset + spec.nbytes - 1):
            bad = bytearray(good)
            bad[place] ^= 1
            data.write_bytes(bad)
            with pytest.raises(WeightsError, match=rf"bytes of .*{spec.name}"):
                check(path)
    data.write_bytes(good[:-1])
    with pytest.raises(WeightsError, match="the manifest says"):
        check(path)


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ({**SHAPES, "more": ("F32", (1,))}, "more is missing"),
        ({k: v for k, v in SHAPES.items() if k != "half"}, "half is not part"),
        ({**SHAPES, "b.bias": ("F32", (6,))}, "b.bias is F32"),
        ({**SHAPES, "half": ("BF16", (1,))}, "half is F16"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, expected, text):
    with pytest.raises(WeightsError, match=text):
        check(write(tmp_path), expected)


def test_an_altered_manifest_is_refused(tmp_path):
    path = write(tmp_path)
    manifest = read_manifest(path)
    path.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(manifest, chunks=bytes(32))))
    with pytest.raises(WeightsError, match="root hash"):
        read_manifest(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(WeightsError):
        read_manifest(path)
    with pytest.raises(WeightsError):
        read_manifest(tmp_path / "nowhere")


def test_tensors_that_do_not_match_their_shapes_are_refused(tmp_path):
    wrong = tensors() | {"b.bias": np.zeros(6, "<f4")}
    with pytest.raises(WeightsError, match=r"b\.bias of 20 bytes, got b\.bias of 24"):
        write(tmp_path, arrays=wrong)
    assert not version_folder(tmp_path, 1).exists()


def test_places_are_absolute_and_the_header_is_aligned():
    header, specs = layout(SHAPES)
    assert len(header) % 8 == 0
    assert specs[0].offset == len(header)
    assert [spec.nbytes for spec in specs] == [24, 20, 2]
    assert json.loads(header[8:])["b.bias"]["data_offsets"] == [24, 44]


def test_only_the_newest_versions_are_kept(tmp_path):
    for version in (1, 2, 3, 10):
        write(tmp_path, version)
    (tmp_path / "vanilla").mkdir()
    retire(tmp_path, keep=2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["v00000003", "v00000010", "vanilla"]
    retire(tmp_path, keep=5)
    assert version_folder(tmp_path, 3).exists()


def test_a_manifest_is_plain_messagepack():
    manifest = Manifest(
        run="r",
        epoch=1,
        version=2,
        nbytes=0,
        tensors=[],
        root=root_hash([], 1, b""),
        chunk_bytes=1,
        chunks=b"",
    )
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest))
    assert decoded["version"] == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'\x05\x00\x00\x00\x00\x00\x00\x00{"a',
        b"\x02\x00\x00\x00\x00\x00\x00\x00\xff\xff",
        b"\x0c\x00\x00\x00\x00\x00\x00\x00" + b'{"a":{"b":1}}'[:12],
        b"\x08\x00\x00\x00\x00\x00\x00\x00" + b'{"a":[]}',
        b"\xff" * 8,
    ],
    ids=["empty", "cut", "no text", "no shape", "no entry", "too long"],
)
def test_what_is_no_safetensors_file_is_refused_as_weights(tmp_path, content):
    (tmp_path / DATA).write_bytes(content)
    with pytest.raises(WeightsError, match="not a safetensors file"):
        read_shapes(tmp_path / DATA)
