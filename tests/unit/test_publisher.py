"""What a publisher remembers of the learners before it."""

from pathlib import Path

import numpy as np

from learner.publisher import Publisher
from learner.run_files import Published
from protocol.weights import DATA, read_manifest


def test_the_newest_version_and_its_line_outlive_the_process(tmp_path):
    values = np.arange(4, dtype="<f4")
    first = Publisher("run", tmp_path, epoch=1, keep=2)
    assert first.published == Published()
    for version in (3, 9):
        data = [("a", memoryview(values).cast("B"))]
        message = first.publish(version, {"a": ("F32", (4,))}, data, line=[(1, 3)])
        assert (message.version, message.line) == (version, [(1, 3)])
    first.close()
    second = Publisher("run", tmp_path, epoch=2, keep=2)
    assert second.published == Published(9, ((1, 3),))
    second.close()


def test_room_for_the_next_version_is_there_before_it_is_published(tmp_path):
    publisher = Publisher("run", tmp_path, epoch=1, keep=1)
    for version in (1, 2, 3):
        values = np.full(4, version, dtype="<f4")
        message = publisher.publish(version, {"a": ("F32", (4,))}, [("a", memoryview(values).cast("B"))])
        publisher.tidied()
        kept = sorted(p.name for p in publisher.folder.iterdir())
        assert [name.partition("-")[0] for name in kept] == ["blank", f"v{version:08d}"]
        assert read_manifest(Path(message.manifest)).version == version
        assert Path(message.manifest).with_name(DATA).read_bytes().endswith(values.tobytes())
    publisher.close()
    assert not publisher.folder.exists()
