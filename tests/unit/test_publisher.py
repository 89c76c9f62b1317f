"""What a publisher remembers of the learners before it."""

import numpy as np

from learner.publisher import Publisher


def test_the_newest_version_outlives_the_process(tmp_path):
    values = np.arange(4, dtype="<f4")
    first = Publisher("run", tmp_path, epoch=1, keep=2)
    assert first.newest == 0
    for version in (3, 9):
        first.publish(version, {"a": ("F32", (4,))}, [("a", memoryview(values).cast("B"))])
    first.close()
    second = Publisher("run", tmp_path, epoch=2, keep=2)
    assert second.newest == 9
    second.close()
