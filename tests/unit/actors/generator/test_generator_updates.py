"""Test the order, staging and verification of weight versions."""

import asyncio
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import actors.generator.weights.staging
from actors.generator.weights.cache import Cache
from actors.generator.weights.staging import (
    Announced,
    NewestWins,
    Stage,
    WeightUpdater,
    link_or_copy,
    tensor_table,
)
from protocol.errors import WeightsError
from protocol.weights.files import write_version
from protocol.weights.format import DATA, read_manifest

SHAPES = {"a": ("F32", (2, 3)), "b": ("F32", (4,))}


def write(
    root: Path, version: int, *, epoch: int = 0, run: str = "r", shapes=SHAPES, fill: float = 1.0
) -> Path:
    sizes = {"F32": np.float32, "F16": np.float16, "I32": np.int32}
    arrays = {name: np.full(shape, fill, dtype=sizes[dtype]) for name, (dtype, shape) in shapes.items()}
    return write_version(
        root,
        run=run,
        epoch=epoch,
        version=version,
        shapes=shapes,
        tensors=((name, memoryview(array).cast("B")) for name, array in arrays.items()),
    )


def stage_in(tmp_path: Path, shapes=SHAPES) -> Stage:
    root = tmp_path / "stage"
    root.mkdir(exist_ok=True)
    return Stage("generator-0", shapes, root=root)


def staged_files(stage: Stage) -> list[str]:
    return sorted(p.name for p in stage.folder.iterdir())


def test_the_newest_announcement_wins_and_what_it_overtakes_is_skipped():
    queue = NewestWins()
    for version in (3, 5, 4):
        queue.offer(Announced(0, version))
    assert queue.take() == Announced(0, 5)
    assert queue.take() is None
    assert queue.skipped == 1


def test_nothing_behind_what_is_in_service_is_taken():
    queue = NewestWins()
    queue.finish(Announced(2, 10), applied=True)
    assert not queue.offer(Announced(2, 10))
    assert not queue.offer(Announced(2, 9))
    assert not queue.offer(Announced(1, 99))
    # A later epoch may start at a lower version.
    assert queue.offer(Announced(3, 4))


def test_a_refused_version_may_be_announced_again():
    queue = NewestWins()
    assert queue.offer(Announced(0, 1))
    queue.finish(queue.take(), applied=False)
    assert queue.offer(Announced(0, 1))


def test_what_is_being_loaded_is_not_taken_again():
    queue = NewestWins()
    queue.offer(Announced(0, 3))
    loading = queue.take()
    assert not queue.offer(Announced(0, 3))
    assert not queue.offer(Announced(0, 2))
    assert queue.offer(Announced(0, 4))
    queue.finish(loading, applied=True)
    assert queue.skipped == 0
    assert queue.take() == Announced(0, 4)


def test_any_publication_is_newer_than_the_model_folder():
    assert NewestWins().offer(Announced(0, 0))


def test_a_good_version_is_staged_under_a_name_of_our_own(tmp_path):
    manifest_path = write(tmp_path, 7)
    stage = stage_in(tmp_path)
    manifest, data = stage.stage(Announced(0, 7, str(manifest_path)), "r")
    assert manifest.version == 7
    assert data.parent == stage.folder
    # The file is linked: no bytes were copied.
    assert data.samefile(manifest_path.with_name(DATA))
    # The publisher retires the version.
    manifest_path.with_name(DATA).unlink()
    assert data.stat().st_size == manifest.nbytes
    stage.discard(data)
    assert staged_files(stage) == []


def test_a_version_is_copied_where_links_are_impossible(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(18, "Invalid cross-device link")

    source = tmp_path / "source"
    source.write_bytes(b"weights")
    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(source, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"weights"
    assert not (tmp_path / "target").samefile(source)


def test_only_what_the_learner_has_not_left_there_itself_is_hashed(tmp_path, monkeypatch):
    hashed = []
    monkeypatch.setattr(
        actors.generator.weights.staging, "verify_bytes", lambda manifest, file: hashed.append(file.name)
    )
    manifest_path = write(tmp_path, 7)
    stage = stage_in(tmp_path)
    stage.stage(Announced(0, 7, str(manifest_path)), "r")
    assert hashed == []
    monkeypatch.setattr(os, "link", lambda source, target: shutil.copyfile(source, target))
    _, data = stage.stage(Announced(0, 7, str(manifest_path)), "r")
    assert hashed == [str(data)]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "said"), [(truncate, "bytes, the manifest says"), (alter, "of a, b do not match")]
)
def test_damaged_bytes_are_refused_and_nothing_is_left(tmp_path, damage, said):
    manifest_path = write(tmp_path, 7)
    damage(manifest_path.with_name(DATA))
    stage = stage_in(tmp_path)
    with pytest.raises(WeightsError, match=said):
        stage.stage(Announced(0, 7, str(manifest_path)), "r")
    assert staged_files(stage) == []


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"a": ("F32", (2, 3))}, "b is missing"),
        (SHAPES | {"c": ("F32", (1,))}, "c is not part of the model"),
        (SHAPES | {"b": ("F32", (2, 2))}, r"b is F32 \[2, 2\]"),
        (SHAPES | {"b": ("I32", (4,))}, "b is I32"),
    ],
)
def test_other_tensors_than_the_model_has_are_refused(tmp_path, shapes, said):
    manifest_path = write(tmp_path, 7, shapes=shapes)
    with pytest.raises(WeightsError, match=said):
        stage_in(tmp_path).stage(Announced(0, 7, str(manifest_path)), "r")


def test_the_first_version_settles_the_float_type(tmp_path):
    half = {name: ("F16", shape) for name, (_, shape) in SHAPES.items()}
    stage = stage_in(tmp_path)
    manifest, _ = stage.stage(Announced(0, 1, str(write(tmp_path, 1, shapes=half))), "r")
    stage.accepted(manifest)
    with pytest.raises(WeightsError, match="is F32"):
        stage.stage(Announced(0, 2, str(write(tmp_path, 2))), "r")
    stage.stage(Announced(0, 3, str(write(tmp_path, 3, shapes=half))), "r")


def test_a_version_that_is_not_what_was_announced_is_refused(tmp_path):
    manifest_path = write(tmp_path, 7, epoch=1)
    stage = stage_in(tmp_path)
    with pytest.raises(WeightsError, match="announced were epoch 1 version 8"):
        stage.stage(Announced(1, 8, str(manifest_path)), "r")
    with pytest.raises(WeightsError, match="belongs to run 'r'"):
        stage.stage(Announced(1, 7, str(manifest_path)), "other")


def test_a_version_that_is_gone_is_refused(tmp_path):
    manifest_path = write(tmp_path, 7)
    manifest_path.with_name(DATA).unlink()
    with pytest.raises(WeightsError, match=r"version 7: .*No such file"):
        stage_in(tmp_path).stage(Announced(0, 7, str(manifest_path)), "r")


def test_what_a_killed_process_of_the_same_name_left_is_removed(tmp_path, monkeypatch):
    stage = stage_in(tmp_path)
    dead = stage.folder.with_name("offbeat-stage-generator-0-dead")
    dead.mkdir()
    (dead / "e0-v1.safetensors").write_bytes(b"left")
    monkeypatch.setattr("protocol.files.YOUNG_S", -1.0)
    newer = stage_in(tmp_path)
    assert stage.folder.exists()
    assert newer.folder.exists()
    assert not dead.exists()
    stage.close()
    assert not stage.folder.exists()


def test_the_table_tells_where_each_tensor_lies(tmp_path):
    manifest_path = write(tmp_path, 7, fill=2.5)
    manifest, data = stage_in(tmp_path).stage(Announced(0, 7, str(manifest_path)), "r")
    raw = data.read_bytes()
    for name, dtype, shape, offset, nbytes in tensor_table(manifest):
        assert (dtype, tuple(shape)) == SHAPES[name]
        assert np.frombuffer(raw[offset : offset + nbytes], "<f4").tolist() == [2.5] * int(np.prod(shape))


def test_weights_that_the_learner_did_not_announce_are_refused_wherever_they_lie(tmp_path):
    stage = stage_in(tmp_path)
    manifest = write(tmp_path, version=3)
    root = read_manifest(Path(manifest)).root
    with pytest.raises(WeightsError, match="announced was 0000"):
        stage.stage(Announced(0, 3, str(manifest), root="0" * 64), "r")
    assert staged_files(stage) == []
    assert stage.stage(Announced(0, 3, str(manifest), root=root), "r")[0].root == root


def test_nothing_that_others_planted_becomes_the_stage(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "offbeat-stage-generator-0-link").symlink_to(tmp_path / "target")
    folder = Stage("generator-0", SHAPES, root=tmp_path).folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "target").iterdir()) == []


def test_a_foreign_cache_is_left_alone(tmp_path, monkeypatch):
    """A lock file of a different user may be a link to a file of ours, or a pipe."""
    foreign = tmp_path / "offbeat-cache-r-0"
    foreign.mkdir()
    os.mkfifo(foreign / "users.lock")
    os.utime(foreign, (0, 0))
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    Cache(tmp_path / "offbeat-cache-r-1", "r").close()
    assert foreign.is_dir()


def test_on_a_host_that_no_weights_reach_the_heartbeat_says_why_and_what_to_do(tmp_path):
    stage, failures = stage_in(tmp_path), []
    updater = WeightUpdater(None, NewestWins(), stage, "r", on_failure=failures.append)
    assert updater.note == ""
    elsewhere = tmp_path / "offbeat-r" / "v00000003" / "manifest.json"
    assert not asyncio.run(updater.update(Announced(0, 3, str(elsewhere))))
    assert "nobody serves weights" in updater.note
    assert "set weights.http in the run file of all roles" in updater.note
    assert failures == []
