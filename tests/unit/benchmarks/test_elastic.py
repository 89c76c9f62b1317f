"""The comparison of hosts that come and go: its changes, and how their time is counted."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.elastic import ARMS, Outcome, host_seconds, table, trace


@given(st.integers(0, 99), st.integers(1, 5), st.floats(1.0, 60.0))
def test_there_is_always_a_host_and_never_twice_the_mean(seed, mean, every_s):
    changes = trace(seed, 600.0, mean, every_s)
    size = mean
    for one in changes:
        size += 1 if one.comes else -1
        assert 1 <= size <= max(2, 2 * mean - 1)
    times = [one.at for one in changes]
    assert times == sorted(times)
    assert all(at < 600.0 for at in times)
    assert 600.0 <= host_seconds(changes, mean, 600.0) <= 600.0 * max(2, 2 * mean - 1)


def test_the_ratio_is_of_the_same_seed_and_of_host_seconds():
    def outcome(arm, seed, trained):
        return Outcome(arm, seed, 60.0, 2, 120.0, trained=trained, lags={1: 30, 3 + seed: 10})

    outcomes = [
        outcome(arm, seed, tokens)
        for seed in (0, 1)
        for arm, tokens in zip(ARMS, (1200, 1080, 600), strict=True)
    ]
    lines = table(outcomes).splitlines()
    assert lines[3].startswith(
        "| elastic | 4 | 9.00 [9.00, 9.00] | 0.90 [0.90, 0.90] | 1.62 [1.50, 1.75] | 4 |"
    )
    assert lines[4].startswith("| restart | 4 | 5.00 [5.00, 5.00] | 0.50 [0.50, 0.50] |")
