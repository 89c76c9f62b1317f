"""Test what a publisher remembers of the learners before it."""

from pathlib import Path

import numpy as np
import pytest

from learner.publisher import Publisher
from learner.run_files import PublishedVersion, next_epoch, weights_folder
from protocol.errors import NameTaken, WeightsError
from protocol.weights.format import DATA, read_manifest


def test_the_newest_version_and_its_line_outlive_the_process(tmp_path):
    values = np.arange(4, dtype="<f4")
    first = Publisher("run", tmp_path, epoch=1, keep=2)
    assert first.published == PublishedVersion()
    for version in (3, 9):
        data = [("a", memoryview(values).cast("B"))]
        message = first.publish(version, {"a": ("F32", (4,))}, data, line=[(1, 3)])
        assert (message.version, message.line) == (version, [(1, 3)])
    first.close()
    second = Publisher("run", tmp_path, epoch=2, keep=2)
    assert second.published == PublishedVersion(9, ((1, 3),))
    second.close()


def publish(publisher, version):
    """Publish a tensor of four values, each the version. Return the name of the version's folder."""
    values = np.full(4, version, dtype="<f4")
    message = publisher.publish(version, {"a": ("F32", (4,))}, [("a", memoryview(values).cast("B"))])
    manifest = Path(message.manifest)
    assert read_manifest(manifest).version == version
    assert manifest.with_name(DATA).read_bytes().endswith(values.tobytes())
    return manifest.parent.name


def test_room_for_the_next_version_is_there_before_it_is_published(tmp_path):
    publisher = Publisher("run", tmp_path, epoch=1, keep=1)
    for version in (1, 2, 3):
        folder = publish(publisher, version)
        publisher.tidied()
        blank, kept = sorted(p.name for p in publisher.folder.iterdir())
        assert (blank.startswith("blank-"), kept) == (True, folder)
    publisher.close()
    assert not publisher.folder.exists()


def test_who_publishes_again_at_once_does_not_wait_for_room(tmp_path, monkeypatch):
    # The generators seem to take for ever.
    monkeypatch.setattr("learner.publisher.GENERATORS_BYTES_PER_S", 1e-6)
    publisher = Publisher("run", tmp_path, epoch=1, keep=1)
    publish(publisher, 1)
    second = publish(publisher, 2)
    assert sorted(p.name for p in publisher.folder.iterdir())[-1] == second
    publisher.close()
    assert not publisher.folder.exists()


def test_a_publication_that_fails_leaves_no_room_behind_and_the_next_succeeds(tmp_path):
    publisher = Publisher("run", tmp_path, epoch=1, keep=2)
    publish(publisher, 1)
    publisher.tidied()
    with pytest.raises(WeightsError, match="expected a of 16 bytes, got b of 16"):
        publisher.publish(2, {"a": ("F32", (4,))}, [("b", memoryview(bytes(16)))])
    assert [p.name for p in publisher.folder.iterdir()] == ["v00000001"]
    publish(publisher, 3)
    publisher.close()


def test_a_learner_that_was_superseded_leaves_the_weights_of_the_next_alone(tmp_path):
    first = Publisher("run", tmp_path, epoch=next_epoch(tmp_path), keep=1)
    publish(first, 1)
    second = Publisher("run", tmp_path, epoch=next_epoch(tmp_path), keep=1)
    folder = publish(second, 2)
    second.tidied()
    first.close()
    assert (second.folder / folder / DATA).exists()
    publish(second, 3)
    second.close()
    assert not second.folder.exists()


def test_a_folder_that_cannot_be_removed_is_one_clear_error(tmp_path, monkeypatch):
    """Only its owner may remove a folder in shared memory."""
    monkeypatch.setattr("learner.run_files.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("learner.publisher.shutil.rmtree", lambda path, ignore_errors: None)
    folder = weights_folder(tmp_path / "run")
    folder.mkdir()
    with pytest.raises(NameTaken, match=rf"{folder.name} is a folder of user .*; have it removed"):
        Publisher("run", tmp_path / "run", epoch=1, keep=2)


def test_a_planted_link_is_not_written_through(tmp_path, monkeypatch):
    monkeypatch.setattr("learner.run_files.SHARED_MEMORY", tmp_path)
    target = tmp_path / "target"
    target.mkdir()
    weights_folder(tmp_path / "run").symlink_to(target)
    with pytest.raises(NameTaken, match="is a link of user"):
        Publisher("run", tmp_path / "run", epoch=1, keep=2)
    assert list(target.iterdir()) == []
