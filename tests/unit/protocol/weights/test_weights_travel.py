"""Test chunks, deltas, and what a manifest must not contain; no sockets."""

import os
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.generator.weights.cache import cache_folder, in_order
from launch.run_file.rules import contradictions
from launch.run_file.sections import RunConfig
from launch.servers import weights_url
from launch.supervise.posts import posts
from protocol.errors import WeightsError
from protocol.weights.files import (
    FileChunk,
    apply_delta,
    chunks,
    damaged,
    digests,
    make_delta,
    missing,
    spans,
    write_version,
)
from protocol.weights.format import (
    DATA,
    MAX_TENSORS,
    Base,
    Manifest,
    parse_manifest,
    read_manifest,
    root_hash,
)
from protocol.weights.server import MAX_NAMELESS, VersionOpener, versions_to_close

SHAPES = {"a": ("F32", (3, 5)), "b": ("F32", (7,))}


def write(root, version, fill=1.0, shapes=SHAPES):
    arrays = {name: np.full(shape, fill, "<f4") for name, (_, shape) in shapes.items()}
    pieces = ((name, memoryview(array.tobytes())) for name, array in arrays.items())
    return write_version(root, run="r", epoch=1, version=version, shapes=shapes, tensors=pieces)


@pytest.fixture
def manifest(tmp_path):
    return read_manifest(write(tmp_path, 7))


def altered(manifest: Manifest, **change) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(manifest, **change))


def tensor(manifest: Manifest, **change) -> dict[str, object]:
    """Return the manifest's fields with its first tensor changed, and a root hash that fits."""
    tensors = [msgspec.structs.replace(manifest.tensors[0], **change), *manifest.tensors[1:]]
    return {"tensors": tensors, "root": root_hash(tensors, manifest.chunk_bytes, manifest.chunks)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"offset": 0}, "is said to have 60 bytes at 0"),
        ({"nbytes": 64}, "is said to have 64 bytes"),
        ({"nbytes": -4}, ">= 0"),
        ({"offset": -1}, ">= 0"),
        ({"shape": [3, 6]}, "by shapes and order it has 72"),
        ({"shape": [2**43, 2**43]}, "by shapes and order"),
        ({"shape": [-3, -5]}, ">= 0"),
        ({"shape": [1] * 17}, "length <= 16"),
        ({"dtype": "F8"}, "dtype 'F8'"),
        ({"name": "b"}, "listed twice"),
        ({"name": "x" * 2_000}, "length <= 1024"),
    ],
)
def test_tensors_that_cannot_be_are_refused(manifest, change, said):
    with pytest.raises(WeightsError, match=said):
        parse_manifest(altered(manifest, **tensor(manifest, **change)), "here")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nbytes": 2**45}, "<= 17592186044416"),
        ({"nbytes": 10}, "its tensors end at"),
        ({"chunk_bytes": 1}, "32 bytes of chunk hashes"),
        ({"chunk_bytes": 0}, ">= 1"),
        ({"chunks": b""}, "0 bytes of chunk hashes"),
        ({"chunks": bytes(32)}, "root hash"),
        ({"chunk_bytes": 2**30}, "<= 16777216"),
        ({"delta_chunks": b"0" * 32}, "32 bytes of chunk hashes"),
        ({"encoding": "xor-zstd"}, "exclude each other"),
        ({"base": Base(1, 6, "0" * 64)}, "exclude each other"),
        ({"encoding": "pickle"}, "Invalid enum value"),
        ({"epoch": -1}, ">= 0"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(manifest, change, said):
    with pytest.raises(WeightsError, match=said):
        parse_manifest(altered(manifest, **change), "here")


def test_too_many_tensors_are_refused(manifest):
    many = [manifest.tensors[0]] * (MAX_TENSORS + 1)
    with pytest.raises(WeightsError, match="length <= 65536"):
        parse_manifest(altered(manifest, tensors=many), "here")


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_junk_is_never_more_than_a_weights_error(junk, seed):
    with pytest.raises(WeightsError):
        parse_manifest(junk, "here")
    shapes = {"a": ("F32", (2,))}
    spec = msgspec.msgpack.encode(
        Manifest(
            run="r",
            epoch=1,
            version=2,
            nbytes=8,
            tensors=[],
            root=root_hash([], 8, bytes(32)),
            chunk_bytes=8,
            chunks=bytes(32),
        )
    )
    rng = random.Random(seed)
    bad = bytearray(spec)
    bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    with pytest.raises(WeightsError):
        parse_manifest(bytes(bad) + repr(shapes).encode(), "here")


def test_chunks_tell_what_is_missing(tmp_path):
    content = bytearray(os.urandom(1_000))
    path = tmp_path / "x"
    path.write_bytes(content)
    with open(path, "r+b") as file:
        hashes = digests(file.fileno(), 1_000, 300)
        whole = Manifest(
            run="r", epoch=1, version=2, nbytes=1_000, tensors=[], root="", chunk_bytes=300, chunks=hashes
        )
        wanted = chunks(whole)
        assert [(c.offset, c.nbytes) for c in wanted] == [(0, 300), (300, 300), (600, 300), (900, 100)]
        assert missing(file.fileno(), wanted) == damaged(file.fileno(), wanted) == []
        os.pwrite(file.fileno(), b"\x00\x01", 599)
        for look in (missing, damaged):
            assert [c.offset for c in look(file.fileno(), wanted)] == [300, 600]
        file.truncate(950)
        for look in (missing, damaged):
            assert [c.offset for c in look(file.fileno(), wanted)] == [300, 600, 900]
        file.truncate(0)
        for look in (missing, damaged):
            assert look(file.fileno(), wanted) == wanted
    assert [[c.offset for c in span] for span in spans(wanted, 3)] == [[0, 300, 600], [900]]


def test_looking_for_what_is_missing_does_not_fill_holes(tmp_path):
    path = tmp_path / "x"
    with open(path, "w+b") as file:
        file.truncate(8 * 2**20)
        wanted = [FileChunk(i * 2**20, 2**20, b"") for i in range(8)]
        assert missing(file.fileno(), wanted) == wanted
        assert os.fstat(file.fileno()).st_blocks == 0


@pytest.fixture(scope="module")
def three_files(tmp_path_factory):
    return [tmp_path_factory.mktemp("delta") / name for name in ("old", "new", "delta", "made")]


@given(
    st.binary(min_size=1, max_size=4_000),
    st.lists(st.tuples(st.integers(0), st.binary(min_size=1, max_size=8))),
)
@settings(max_examples=100, deadline=None)
def test_a_delta_is_lossless(three_files, old, changes):
    new = bytearray(old)
    for place, piece in changes:
        at = place % len(new)
        new[at : at + len(piece)] = piece[: len(new) - at]
    paths = three_files
    paths[0].write_bytes(old)
    paths[1].write_bytes(new)
    with (
        open(paths[0], "rb") as a,
        open(paths[1], "rb") as b,
        open(paths[2], "w+b") as d,
        open(paths[3], "wb") as m,
    ):
        size = make_delta(a.fileno(), b.fileno(), len(new), d.fileno(), largest=2 * len(new) + 100)
        assert size == os.fstat(d.fileno()).st_size
        d.seek(0)
        apply_delta(d.fileno(), a.fileno(), m.fileno(), len(new))
    assert paths[3].read_bytes() == new


@pytest.mark.parametrize("damage", ["cut", "longer", "junk", "empty"])
def test_a_delta_that_is_none_is_refused(tmp_path, damage):
    old, new = os.urandom(200_000), os.urandom(200_000)
    (tmp_path / "old").write_bytes(old)
    (tmp_path / "new").write_bytes(new)
    delta = tmp_path / "delta"
    with open(tmp_path / "old", "rb") as a, open(tmp_path / "new", "rb") as b, open(delta, "wb") as d:
        make_delta(a.fileno(), b.fileno(), len(new), d.fileno(), largest=10**9)
    told = delta.read_bytes()
    delta.write_bytes({"cut": told[:-1000], "longer": told, "junk": os.urandom(5_000), "empty": b""}[damage])
    nbytes = len(new) - 1 if damage == "longer" else len(new)
    with (
        open(delta, "rb") as d,
        open(tmp_path / "old", "rb") as a,
        open(tmp_path / "made", "wb") as m,
        pytest.raises(WeightsError, match="the delta"),
    ):
        apply_delta(d.fileno(), a.fileno(), m.fileno(), nbytes)


def test_a_large_delta_is_given_up(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).write_bytes(os.urandom(300_000))
    with (
        open(tmp_path / "old", "rb") as a,
        open(tmp_path / "new", "rb") as b,
        open(tmp_path / "d", "wb") as d,
    ):
        assert make_delta(a.fileno(), b.fileno(), 300_000, d.fileno(), largest=180_000) is None


def test_a_sample_tells_that_a_delta_is_not_worth_it(tmp_path):
    nbytes = 8 * 2**20
    old = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    for name, changed in (
        ("few", old.copy()),
        ("all", np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)),
    ):
        if name == "few":
            changed[::1000] ^= 1
        (tmp_path / "old").write_bytes(old.tobytes())
        (tmp_path / "new").write_bytes(changed.tobytes())
        with (
            open(tmp_path / "old", "rb") as a,
            open(tmp_path / "new", "rb") as b,
            open(tmp_path / "d", "w+b") as d,
        ):
            size = make_delta(a.fileno(), b.fileno(), nbytes, d.fileno(), largest=nbytes // 2)
            assert (size is None) == (name == "all")
            assert os.fstat(d.fileno()).st_size == (size or 0)


def test_other_tensors_have_no_delta(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2, shapes={"a": ("F32", (5, 3)), "b": ("F32", (7,))})
    shelf = VersionOpener("r", lambda _, version: tmp_path / f"v{version:08d}", tmp_path)
    one, two = shelf.open(1, 1), shelf.open(1, 2)
    assert shelf.delta(two, one) is None
    one.file.close()
    two.file.close()


def test_what_is_idle_is_closed_and_few_retired_versions_are_kept(tmp_path):
    shelf = VersionOpener("r", lambda _, version: tmp_path / f"v{version:08d}", tmp_path, clock=lambda: 0.0)
    held = {}
    for version in range(6):
        path = write(tmp_path, version)
        held[(1, version, None)] = shelf.open(1, version)
        held[(1, version, None)].used = float(version)
        if version < 4:
            path.with_name(DATA).unlink()
    assert versions_to_close(held, 10.0) == [(1, 0, None), (1, 1, None)]
    held[(1, 0, None)].transfers = 1
    assert versions_to_close(held, 10.0) == [(1, 1, None), (1, 2, None)]
    assert len(versions_to_close(held, 1_000.0)) == 5
    assert MAX_NAMELESS == 2
    for one in held.values():
        one.file.close()


def test_relays_are_asked_in_any_order_and_the_learner_last():
    sources = ["http://a", "http://b", "http://c", "http://learner"]
    orders = {tuple(in_order(sources)) for _ in range(200)}
    assert len(orders) == 6
    assert {order[-1] for order in orders} == {"http://learner"}


def test_runs_of_one_name_do_not_share_a_cache(tmp_path):
    one, other = (cache_folder(tmp_path, "run", f"tcp://{host}:5755") for host in ("a", "b"))
    assert one != other
    assert one.name.startswith("offbeat-cache-run-")


def config(**sections) -> RunConfig:
    return RunConfig.model_validate({"model": {"tiny": {}}, "env": {"name": "calculator_game"}} | sections)


def test_the_server_is_started_where_it_is_asked_for():
    assert "weights" not in [post.name for post in posts(config())]
    assert weights_url(config(), None) == ""
    asked = config(weights={"http": "0.0.0.0:5757", "advertised_host": "node-1"})
    assert "weights" in [post.name for post in posts(asked)]
    assert weights_url(asked, None) == "http://node-1:5757"
    assert weights_url(asked, Path("keys")) == "https://node-1:5757"
    assert weights_url(config(weights={"http": "127.0.0.1:5757"}), None) == "http://127.0.0.1:5757"


def test_generators_of_a_host_need_a_port_each():
    sections = {"generator": {"count": 2, "weights_http": "127.0.0.1:5758"}}
    assert [line for line in contradictions(config(**sections)) if "use port 0" in line]
    sections["generator"]["weights_http"] = "127.0.0.1:0"
    assert not [line for line in contradictions(config(**sections)) if "use port 0" in line]


def test_strangers_are_not_served():
    open_to_all = config(
        weights={"http": "0.0.0.0:5757"},
        generator={"weights_http": "10.0.0.1:0"},
        security={"encrypt": False},
    )
    said = [line for line in contradictions(open_to_all) if "_http" in line or "weights.http" in line]
    assert len(said) == 2
    assert all("only loopback" in line for line in said)
    assert not [line for line in contradictions(config(weights={"http": "0.0.0.0:5757"})) if "http" in line]
