"""Test the check that codec, batching and objective do not cost more than before."""

import json

import numpy as np
import pytest
import torch

from benchmarks.ratios.program import BASELINE, MOST_DROP, Pair, calls, complaints, counts, pairs, peak_bytes


def test_a_drop_beyond_a_fifth_is_a_complaint_and_a_rise_is_none():
    baseline = {"encoding, calls": 0.5}
    assert complaints({"encoding, calls": 0.41}, baseline) == []
    assert complaints({"encoding, calls": 2.0}, baseline) == []
    [complaint] = complaints({"encoding, calls": 0.39}, baseline)
    assert complaint == "encoding, calls: 0.3900, at least 0.4000 (baseline 0.5000)"


def test_times_have_a_wider_limit():
    baseline = {"batching, time": 0.1}
    assert complaints({"batching, time": 0.06}, baseline) == []
    assert len(complaints({"batching, time": 0.04}, baseline)) == 1


def test_what_is_missing_on_either_side_is_a_complaint():
    assert "renew the baseline" in complaints({"a, calls": 1.0}, {})[0]
    assert "renew the baseline" in complaints({}, {"a, calls": 1.0})[0]


def test_functions_are_counted_of_both_languages():
    def inner():
        return len([])

    def run():
        inner()
        inner()

    assert calls(run) - calls(lambda: None) == 4


def test_memory_that_is_freed_again_counts():
    assert 8e6 <= peak_bytes(lambda: np.zeros(10**6).sum()) < 8.1e6


def test_an_extra_copy_and_an_extra_operator_show():
    x = torch.ones(1000)
    found = counts(Pair(lambda: (x + 1) * 2, lambda: x + 1, torch=True))
    assert found == {"operators": 0.5, "operators' bytes": 0.5}
    array = np.ones(10**6)
    found = counts(Pair(lambda: (array.copy(), array.copy()), lambda: array.copy(), torch=False))
    assert found["peak bytes"] == pytest.approx(0.5, rel=0.01)


def test_both_ways_of_a_pair_give_the_same_where_they_can_be_compared():
    for name in ("objective", "log-probabilities"):
        ours, plain, _ = pairs()[name]
        # Our side of this pair returns the log-probability, not a loss.
        sign = -1 if name == "log-probabilities" else 1
        for got, want in zip(ours(), plain(), strict=True):
            torch.testing.assert_close(sign * got, want, atol=1e-4, rtol=1e-4)


def test_the_stored_baseline_is_of_these_pairs():
    names = json.loads(BASELINE.read_text())
    assert {name.rpartition(", ")[0] for name in names} == set(pairs())
    assert {name.rpartition(", ")[2] for name in names} <= set(MOST_DROP)
