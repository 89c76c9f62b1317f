"""Delays grow within a row of restarts; a process that has lived long enough begins a new row."""

from launch.supervise.health import FIRST_DELAY_S, LONGEST_DELAY_S, Patience, RestartBackoff


def test_the_first_restart_comes_at_once_and_delays_double_up_to_the_longest():
    row, patience = RestartBackoff(), Patience(max_restarts=9, settled_s=60.0)
    delays = [row.ended("x", lived_s=1.0, now=100.0, patience=patience) - 100.0 for _ in range(9)]
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert (FIRST_DELAY_S, LONGEST_DELAY_S) == (1.0, 30.0)
    assert row.ended("x", lived_s=1.0, now=100.0, patience=patience) is None
    assert row.total == 9, "the end of the row is no restart"


def test_a_settled_process_begins_a_new_row_but_all_are_counted():
    row, patience = RestartBackoff(), Patience(max_restarts=2, settled_s=60.0)
    for _ in range(5):
        assert row.ended("x", lived_s=60.0, now=7.0, patience=patience) == 7.0
    assert (row.in_row, row.total, row.reasons) == (1, 5, ["x"] * 5)


def test_no_restarts_may_be_wanted():
    assert RestartBackoff().ended("x", lived_s=1e9, now=0.0, patience=Patience(max_restarts=0)) is None
