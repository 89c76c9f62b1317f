"""Test how long the learner may write before it is taken for one that hangs."""

import pytest

from learner.run import WritePatience
from protocol.messages.fields import MAX_PATIENCE_S


def test_a_write_that_fails_has_ended_too():
    patience = WritePatience()
    with pytest.raises(OSError, match="disk"), patience.writing(10**9):
        raise OSError("disk full")
    assert (patience.patience_s, patience.writes) == (0.0, 1)


def test_no_write_asks_for_more_than_a_heartbeat_may_say():
    patience = WritePatience()
    with patience.writing(10**15):
        assert patience.patience_s == MAX_PATIENCE_S


def test_the_slowest_write_so_far_decides():
    times = iter([0.0, 100.0, 200.0, 201.0, 300.0, 310.0])
    patience = WritePatience(clock=lambda: next(times))
    asked = []
    for _ in range(3):
        with patience.writing(10**9):
            asked.append(patience.patience_s)
    assert asked == [20.0, 400.0, 400.0]
