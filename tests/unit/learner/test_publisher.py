"""Test a publisher: the order of its events, what a crash between them leaves, and what it remembers."""

import threading
from pathlib import Path

import pytest
import torch

import learner.publisher
from learner.errors import NotAnnounced
from learner.publisher import Publisher
from learner.run_files import PublishedVersion, next_epoch, read_published, weights_folder
from learner.weight_copy import OutgoingWeights
from protocol.errors import NameTaken, WeightsError
from protocol.weights.files import NewVersion, verify
from protocol.weights.format import DATA, MANIFEST, read_manifest

SHAPES = {"a": ("F32", (4,))}


def weights(value):
    """Return a tensor of four values, as weights to publish."""
    return OutgoingWeights(SHAPES, [("a", torch.full((4,), float(value)))])


def publish(publisher, version):
    """Publish a tensor of four values, each the version. Return the name of the version's folder."""
    told = []
    publisher.publish(version, weights(version), announce=told.append)
    publisher.settle()
    (message,) = told
    manifest = Path(message.manifest)
    assert read_manifest(manifest).version == message.version == version
    assert manifest.with_name(DATA).read_bytes().endswith(torch.full((4,), float(version)).numpy().tobytes())
    return manifest.parent.name


def versions(publisher):
    """Return the names of the folders that a generator could read."""
    return sorted(path.name for path in publisher.folder.glob("v*"))


class Gate:
    """Holds up a call until it is opened, so that a test can look at what has happened by then."""

    def __init__(self, monkeypatch, owner, name):
        self.reached, self._open, call = threading.Event(), threading.Event(), getattr(owner, name)

        def held(*arguments, **named):
            self.reached.set()
            assert self._open.wait(30.0)
            return call(*arguments, **named)

        monkeypatch.setattr(owner, name, held)

    def open(self):
        self._open.set()


@pytest.fixture
def publisher(tmp_path):
    publisher = Publisher("run", tmp_path, epoch=1, keep=2)
    yield publisher
    publisher.close()


def test_the_newest_version_and_its_line_outlive_the_process(tmp_path):
    first = Publisher("run", tmp_path, epoch=1, keep=2)
    assert first.published == PublishedVersion()
    told = []
    for version in (3, 9):
        first.publish(version, weights(0), announce=told.append, line=[(1, 3)])
    first.settle()
    assert [(message.version, message.line) for message in told] == [(3, [(1, 3)]), (9, [(1, 3)])]
    assert (first.published, first.announced) == (PublishedVersion(9, ((1, 3),)), 9)
    first.close()
    second = Publisher("run", tmp_path, epoch=2, keep=2)
    assert (second.published, second.announced) == (PublishedVersion(9, ((1, 3),)), 0)
    second.close()


def test_the_learner_goes_on_when_its_weights_are_copied(publisher, tmp_path, monkeypatch):
    gate, told, tensor = Gate(monkeypatch, NewVersion, "finish"), [], torch.ones(4)
    publisher.publish(1, OutgoingWeights(SHAPES, [("a", tensor)]), announce=told.append)
    # The next optimizer step changes the weights.
    tensor.fill_(2.0)
    assert gate.reached.wait(30.0)
    assert (told, versions(publisher), publisher.announced, publisher.announced_s) == ([], [], 0, None)
    # The number is noted before anybody hears of it.
    assert read_published(tmp_path) == PublishedVersion(1)
    gate.open()
    publisher.settle()
    assert publisher.announced_s >= publisher.stood_s > 0
    with open(publisher.folder / versions(publisher)[0] / DATA, "rb") as data:
        assert data.read().endswith(torch.ones(4).numpy().tobytes())
        verify(read_manifest(Path(told[0].manifest)), data, SHAPES)


def test_a_version_is_whole_and_noted_before_it_is_announced(publisher, tmp_path):
    seen = []

    def announce(message):
        with open(Path(message.manifest).with_name(DATA), "rb") as data:
            verify(read_manifest(Path(message.manifest)), data, SHAPES)
        seen.append(read_published(tmp_path).version)

    publisher.publish(7, weights(7), announce=announce)
    publisher.settle()
    assert seen == [7]


def test_a_version_is_copied_when_the_one_before_is_announced(publisher, monkeypatch):
    gate, told = Gate(monkeypatch, learner.publisher, "write_published"), []
    taken = []

    def tensors():
        taken.append([message.version for message in told])
        yield "a", torch.zeros(4)

    publisher.publish(1, weights(1), announce=told.append)
    assert gate.reached.wait(30.0)
    other = threading.Thread(
        target=publisher.publish,
        args=(2, OutgoingWeights(SHAPES, tensors())),
        kwargs={"announce": told.append},
    )
    other.start()
    gate.open()
    other.join(30.0)
    publisher.settle()
    assert taken == [[1]]
    assert [message.version for message in told] == [1, 2]


@pytest.mark.parametrize("stage", ["hashes", "manifest", "rename", "announcement"])
def test_a_version_that_fails_behind_the_learner_ends_it_with_the_cause(publisher, monkeypatch, stage):
    told = []

    def fail(*arguments, **named):
        raise OSError(28, "No space left on device", "/dev/shm/x")

    def half(path, content):
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
        fail()

    match stage:
        case "hashes":
            monkeypatch.setattr("protocol.weights.files.digest", fail)
        case "manifest":
            monkeypatch.setattr(Path, "write_bytes", half)
        case "rename":
            monkeypatch.setattr(Path, "rename", fail)
    publisher.publish(1, weights(1), announce=fail if stage == "announcement" else told.append)
    for call in (
        publisher.settle,
        publisher.check,
        lambda: publisher.publish(2, weights(2), announce=told.append),
    ):
        with pytest.raises(OSError, match="No space left") as caught:
            call()
        assert "while policy version 1 was being published" in caught.value.__notes__
    assert (told, publisher.announced) == ([], 0)
    if stage != "announcement":
        assert list(publisher.folder.iterdir()) == []


def test_a_thread_that_hangs_ends_the_learner_and_announces_nothing_any_more(publisher, monkeypatch):
    gate, told = Gate(monkeypatch, learner.publisher, "write_published"), []
    monkeypatch.setattr("learner.publisher.PATIENCE_S", 0.01)
    publisher.publish(1, weights(1), announce=told.append)
    assert gate.reached.wait(30.0)
    with pytest.raises(NotAnnounced, match=r"policy version 1 \(.* bytes\) was copied, but not hashed"):
        publisher.settle()
    publisher.stop()
    gate.open()
    monkeypatch.setattr("learner.publisher.PATIENCE_S", 30.0)
    with pytest.raises(NotAnnounced, match="because the learner has ended"):
        publisher.settle()
    assert told == []


def test_memory_is_registered_ahead_and_for_one_version_only(tmp_path):
    registered, ended = [], []

    def register(memory):
        registered.append(memory.nbytes)
        return lambda: ended.append(memory.nbytes)

    publisher = Publisher("run", tmp_path, epoch=1, keep=1, register=register)
    for version in (1, 2):
        publish(publisher, version)
        publisher.await_tidied()
    assert (len(registered), len(ended)) == (2, 1)
    publisher.close()
    assert (len(registered), len(ended)) == (2, 2)


def test_room_for_the_next_version_is_there_before_it_is_published(tmp_path):
    publisher = Publisher("run", tmp_path, epoch=1, keep=1)
    for version in (1, 2, 3):
        folder = publish(publisher, version)
        publisher.await_tidied()
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


def test_a_copy_that_fails_leaves_no_room_behind_and_the_next_succeeds(publisher):
    publish(publisher, 1)
    publisher.await_tidied()
    with pytest.raises(WeightsError, match="expected a of 16 bytes, got b of 16"):
        publisher.publish(2, OutgoingWeights(SHAPES, [("b", torch.zeros(4))]), announce=pytest.fail)
    assert [p.name for p in publisher.folder.iterdir()] == ["v00000001"]
    publish(publisher, 3)


def test_a_learner_that_was_superseded_leaves_the_weights_of_the_next_alone(tmp_path):
    first = Publisher("run", tmp_path, epoch=next_epoch(tmp_path), keep=1)
    publish(first, 1)
    second = Publisher("run", tmp_path, epoch=next_epoch(tmp_path), keep=1)
    folder = publish(second, 2)
    second.await_tidied()
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


def test_bfloat16_is_the_nearest_and_other_types_stay(tmp_path):
    values = torch.tensor([1.0, 1.001, -3.14159, 1e-40, float("inf"), float("nan")])
    shapes, empty = {"a": ("BF16", (6,)), "b": ("I64", (1,)), "c": ("F32", (0,))}, torch.zeros(0)
    new = NewVersion(tmp_path, shapes)
    tensors = [("a", values), ("b", torch.tensor([7])), ("c", empty)]
    OutgoingWeights(shapes, tensors).copy_into(new.memory, new.places, new.written)()
    path, manifest = new.finish(run="r", epoch=1, version=1)
    assert path.name == MANIFEST
    with open(path.with_name(DATA), "rb") as data:
        verify(manifest, data, shapes)
    first, second, _ = (bytes(new.memory[p.offset : p.offset + p.nbytes]) for p in new.places)
    assert first == values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert second == torch.tensor([7]).numpy().tobytes()
