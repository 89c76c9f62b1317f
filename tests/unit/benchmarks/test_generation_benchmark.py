"""Test what `benchmarks.generation` and `benchmarks.weights` print for known figures."""

from benchmarks.generation import program as generation
from benchmarks.generation.system import Outcome
from benchmarks.weights import program as weights


def test_ratios_are_of_rounds_that_ran_one_after_the_other():
    fast, slow = Outcome(100, 1.0, {"engine": 0.5}), Outcome(100, 2.0, {"engine": 0.5})
    rounds = {generation.OURS: [slow, slow, fast], generation.BAR: [fast, slow, fast]}
    found = generation.summary(rounds)[generation.OURS]
    assert found["tokens_per_second"] == [50.0, 50.0, 100.0]
    assert found["over_bare"] == [1.0, 0.5, 1.0]
    assert found["cpu_us_per_token"] == {"engine": 5_000.0}
    assert "| ours | 50 [50, 100] | 1.00 [0.50, 1.00] | engine 5000 |" in generation.table(
        generation.summary(rounds)
    )


def test_seconds_are_printed_as_milliseconds_and_ratios_as_they_are():
    row = dict.fromkeys(weights.COLUMNS, 0.5)
    found = weights.summary([row, row | {"load_s": 1.0}, row])
    assert found["load_s"] == [0.5, 0.5, 1.0]
    table = weights.table({"1M": {"bytes": 5_000_000, "ways": {"HTTP": found}}})
    assert "| 1M (5 MB), HTTP | 500 [500, 500] |" in table
    assert table.endswith("| 0.50 [0.50, 0.50] |")
