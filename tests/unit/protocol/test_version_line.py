import numpy as np
import pytest

from protocol.version_line import MAX_FORKS, VersionLine


def test_without_a_restart_every_version_is_its_own_place():
    line = VersionLine()
    versions = np.array([-1, 0, 3], dtype=np.int32)
    assert line.placed(versions) is versions
    assert (line.start, line.freshest(7), line.lag(3, 5)) == (0, 7, 2)


def test_what_a_checkpoint_covers_lags_as_before_and_what_was_undone_lags_its_way_back():
    line = VersionLine([(10, 20)])  # a checkpoint at 10, a crash at 19
    assert [line.lag(v, 20) for v in (10, 9, 11, 19)] == [0, 1, 1, 9]
    assert [line.lag(v, 22) for v in (10, 17, 20, 22)] == [2, 9, 2, 0]


def test_two_crashes_between_two_checkpoints():
    # Versions 20 to 24, which continued from 10, are undone, too.
    line = VersionLine([(10, 20), (10, 25)])
    assert [line.lag(v, 25) for v in (10, 20, 23, 15, 8)] == [0, 0, 3, 5, 2]


def test_a_checkpoint_on_the_second_line():
    line = VersionLine([(10, 20), (22, 30)])
    assert [line.lag(v, 30) for v in (22, 20, 25, 10, 9, 12)] == [0, 2, 3, 2, 3, 4]


def test_arrays_keep_shape_dtype_and_observations():
    placed = VersionLine([(10, 20)]).placed(np.array([-1, 10, 17, 21], dtype=np.int32))
    assert (placed.tolist(), placed.dtype) == ([-1, 20, 13, 21], np.int32)


def test_the_freshest_place_of_what_is_told_by_its_largest_number():
    line = VersionLine([(10, 20)])
    assert [line.freshest(v) for v in (-1, 8, 10, 17, 21)] == [-1, 18, 20, 20, 21]


@pytest.mark.parametrize("fork", [(10, 15), (20, 20), (9, 20), (-1, 30)])
def test_numbers_only_grow(fork):
    with pytest.raises(ValueError, match="numbers only grow"):
        VersionLine([(10, 20), fork])


def test_the_oldest_forks_are_forgotten():
    line = VersionLine((n, n + 1) for n in range(0, 4 * MAX_FORKS, 2))
    assert len(line.forks) == MAX_FORKS
    assert line.lag(line.start - 1, line.start) == 0
    line.fork(line.start, line.start + 1)
    assert len(line.forks) == MAX_FORKS
