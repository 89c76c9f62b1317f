"""Test what the table of a run beside a page says, on windows with known rates."""

import math

import pytest

from benchmarks.view import PACES, ROUND, beside_figures

LOSS = 0.004
"""Part of the run that a round of the page in each window takes."""
ROUNDS = {"A": 0, "P": 2, "D": 24}


def windows_of(blocks, *, drift=0.01):
    """Return windows of a run that becomes slower by an equal factor from window to window, and by what is asked."""
    windows = []
    for number in range(len(ROUND) * blocks):
        arm = ROUND[number % len(ROUND)]
        rate = 1_000 * math.exp(-drift * number - LOSS * ROUNDS[arm])
        windows.append(
            {
                "arm": arm, "block": number // len(ROUND), "begin": 10.0 * number, "end": 10.0 * number + 9,
                "rounds": {"page": ROUNDS[arm], "client": 2 * ROUNDS[arm]},
                "cpu_share": dict.fromkeys(("viewer", "browser", "client", "run"), 5.0 * ROUNDS[arm]),
                "tokens_per_s": rate, "steps_per_s": rate / 700, "run_cpu_ms_per_token": 1 / rate,
            }
        )  # fmt: skip
    return windows


def tokens(figures, words):
    return next(one for one in figures if one.name == f"sampled tokens, with {words}")


def test_a_page_costs_what_many_rounds_cost_divided_by_their_number():
    figures = beside_figures(windows_of(4))
    page, often = tokens(figures, "a page and a client"), tokens(figures, "both asking oftener")
    one = math.exp(-LOSS * ROUNDS["P"])
    # Arms stand around the middle of a block alike, so a drift falls out but for its curvature.
    assert page.ratio == pytest.approx(one, rel=1e-3)
    assert often.ratio == pytest.approx(math.exp(-LOSS * ROUNDS["D"]), rel=1e-3)
    mean, low, high = (
        float(word)
        for word in often.note.rpartition("rounds ")[2].replace("[", "").rstrip("]").replace(",", "").split()
    )
    assert "for one of 12.0 times as many rounds" in often.note
    assert mean == pytest.approx(one, abs=2e-4)
    assert low == pytest.approx(high, abs=1e-4), "equal blocks leave nothing open"
    assert PACES["D"] > PACES["P"] > PACES["A"] == 0


def test_a_window_in_which_the_page_asked_nothing_is_not_counted():
    windows = windows_of(3)
    silent = next(one for one in windows if one["arm"] == "P")
    silent["rounds"]["page"], silent["tokens_per_s"] = 0, 1e9
    page = tokens(beside_figures(windows), "a page and a client")
    assert len(page.values) == 3
    assert max(page.values) < 1_001
    for one in windows:
        if one["arm"] == "P" and one["block"] == 0:
            one["rounds"]["page"] = 0
    # A block without an arm tells nothing.
    assert len(tokens(beside_figures(windows), "a page and a client").values) == 2
