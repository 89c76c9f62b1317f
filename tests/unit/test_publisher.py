"""What a publisher remembers of the learners before it."""

import numpy as np

from learner.publisher import Publisher
from learner.run_files import Published


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
