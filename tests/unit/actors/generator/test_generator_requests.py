"""Test the states of a generator's requests, and the stamping of tokens with versions."""

import pytest

from actors.generator.requests import HOLD_TIMEOUT_S, RequestBook, stamp, why_invalid
from protocol.messages.peers import Generate


@pytest.mark.parametrize(
    ("starts", "begin", "end", "expected"),
    [
        ([(7, 0)], 0, 3, [7, 7, 7]),
        ([(7, 0), (8, 3)], 0, 5, [7, 7, 7, 8, 8]),
        ([(7, 0), (8, 3), (9, 4)], 2, 6, [7, 8, 9, 9]),
        ([(7, 0), (8, 3)], 3, 5, [8, 8]),
        ([(7, 0), (8, 3)], 0, 2, [7, 7]),
        ([(7, 0), (8, 9)], 4, 6, [7, 7]),
        ([(7, 0), (6, 2)], 1, 3, [7, 6]),  # a later epoch may have a lower version
    ],
)
def test_every_token_gets_the_version_whose_span_it_lies_in(starts, begin, end, expected):
    assert stamp(starts, begin, end).tolist() == expected


@pytest.mark.parametrize("starts", [[], [(8, 3)]])
def test_a_token_before_the_first_span_is_an_error(starts):
    with pytest.raises(ValueError, match="no version is known for token 2"):
        stamp(starts, 2, 5)


def request(**settings) -> Generate:
    return Generate(**({"request_id": "r", "max_tokens": 4} | settings))


@pytest.mark.parametrize(
    ("prompt", "settings", "said"),
    [
        ([], {}, "empty"),
        ([1] * 8, {}, "max_model_len = 8"),
        ([1, -1], {}, "prompt[1] = -1"),
        ([50], {}, "prompt[0] = 50"),
        ([1], {"stop_token_ids": [-1]}, "stop_token_ids"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_k": -2}, "top_k"),
        ([1], {"temperature": -1.0}, "temperature"),
    ],
)
def test_an_invalid_request_is_told_what_is_wrong(prompt, settings, said):
    assert said in why_invalid(prompt, request(**settings), vocab_size=50, max_model_len=8)


def test_a_valid_request_passes():
    assert why_invalid([0, 49], request(stop_token_ids=[1, 50]), vocab_size=50, max_model_len=8) == ""


def test_a_request_waits_for_the_version_it_asks_for():
    book = RequestBook(0.0)
    assert book.add("now", min_version=1, version=1, now=0.0)
    assert not book.add("later", min_version=3, version=1, now=0.0)
    assert (book.running, book.held) == (1, 1)
    assert book.start_held(version=2, now=1.0) == []
    assert book.start_held(version=3, now=2.0) == ["later"]
    assert (book.running, book.held) == (2, 0)


def test_a_late_joiner_runs_nothing_before_it_has_caught_up():
    book = RequestBook(0.0)
    book.gate = 5
    assert not book.add("a", min_version=0, version=0, now=0.0)
    assert book.start_held(version=4, now=1.0) == []
    assert book.start_held(version=5, now=2.0) == ["a"]


def test_a_held_request_expires_at_its_deadline_and_names_the_version():
    book = RequestBook(0.0)
    book.add("a", min_version=4, version=1, now=10.0)
    assert book.expire(10.0 + HOLD_TIMEOUT_S - 0.01) == []
    assert book.expire(10.0 + HOLD_TIMEOUT_S) == [("a", 4)]
    assert "a" not in book
    assert book.start_held(version=9, now=99.0) == []


def test_rates_cover_the_window_since_they_were_asked_for():
    book = RequestBook(0.0)
    book.add("a", min_version=0, version=0, now=4.0)
    book.tokens(30)
    book.finish("a", 7.0)
    rates = book.rates(10.0)
    assert rates.tokens_per_second == 3.0
    assert rates.idle_share == pytest.approx(0.7)  # idle in [0, 4) and [7, 10)
    book.add("b", min_version=0, version=0, now=10.0)
    rates = book.rates(12.0)
    assert (rates.tokens_per_second, rates.idle_share) == (0.0, 0.0)
    assert book.tokens_total == 30


def test_seconds_without_a_request_add_up_however_often_rates_are_asked_for():
    book = RequestBook(100.0)
    book.add("a", min_version=0, version=0, now=104.0)
    book.rates(105.0)
    book.finish("a", 107.0)
    book.rates(108.0)
    assert book.seconds(110.0) == (7.0, 10.0)


def test_finishing_twice_or_unknown_changes_nothing():
    book = RequestBook(0.0)
    book.add("a", min_version=0, version=0, now=0.0)
    book.finish("a", 1.0)
    book.finish("a", 2.0)
    book.finish("never", 2.0)
    assert (book.running, book.held, book.keys()) == (0, 0, [])
