"""Test when a draining generator may leave the actors that are connected to it."""

from actors.generator.requests import SILENT_S, Guests


def test_without_actors_a_generator_may_leave_at_once():
    guests = Guests()
    guests.drain(now=0.0)
    assert guests.needed(now=0.0) == 0


def test_a_generator_stays_until_each_actor_has_said_that_it_needs_it_no_more():
    guests = Guests()
    assert not guests.heard(b"a", 0, now=0.0)
    assert not guests.heard(b"b", 0, now=0.0)
    assert guests.drain(now=100.0) == [b"a", b"b"]
    assert guests.needed(now=100.0) == 2  # neither has answered
    assert not guests.heard(b"a", 7, now=100.1)
    assert not guests.heard(b"b", 0, now=100.1)
    assert guests.needed(now=100.2) == 7
    for second in range(101, 130):
        guests.heard(b"a", 2, now=second)
        assert guests.needed(now=second) == 2
    guests.heard(b"a", 0, now=130.0)
    assert guests.needed(now=130.0) == 0


def test_a_goodbye_and_a_silence_end_the_need():
    guests = Guests()
    guests.heard(b"a", 0, now=0.0)
    guests.heard(b"b", 0, now=0.0)
    guests.drain(now=0.0)
    guests.heard(b"a", 3, now=1.0)
    guests.left(b"a")
    assert guests.needed(now=1.0) == 1
    assert guests.needed(now=SILENT_S - 0.1) == 1  # the other one may still answer
    assert guests.needed(now=SILENT_S) == 0
    guests.heard(b"b", 3, now=10.0)
    assert guests.needed(now=10.0 + SILENT_S) == 0


def test_an_actor_that_comes_while_the_generator_drains_is_told_once():
    guests = Guests()
    guests.drain(now=0.0)
    assert guests.heard(b"late", 0, now=1.0)
    assert not guests.heard(b"late", 4, now=1.1)
    assert guests.needed(now=1.2) == 4


def test_an_actor_of_an_earlier_version_that_only_asks_is_told_too():
    guests = Guests()
    assert not guests.asked(b"old", now=0.0)
    assert guests.drain(now=1.0) == [b"old"]
    assert guests.needed(now=2.0) == 1
    assert guests.asked(b"other", now=2.0)
