"""Test the peer's side of a connection: join, beat, join again."""

import math

import pytest
from msgspec.structs import replace

from protocol.messages.peers import Heartbeat, Hello, Refused, Welcome
from protocol.session import HELLO_RETRY_S, LONGEST_BEAT_S, MISSED_BEATS, LongMessages, Progress, Session

HELLO = Hello(role="actor", peer="a", incarnation=1)
WELCOME = Welcome(run="r", epoch=0, heartbeat_s=2.0, policy_version=0)


def joined(now=0.0):
    session = Session(HELLO, now)
    assert session.due(now, Progress) == [HELLO]
    assert session.received(WELCOME, now)
    return session


def test_hello_is_repeated_until_a_welcome_comes():
    session = Session(HELLO, 0.0)
    sent = [now for now in range(5) for _ in session.due(float(now) * HELLO_RETRY_S, Progress)]
    assert sent == [0, 1, 2, 3, 4]
    assert not session.joined
    assert session.due(4.5 * HELLO_RETRY_S, Progress) == []


def test_heartbeats_follow_the_broker_s_rhythm_and_carry_progress():
    session = joined()
    progress = Progress(progress=7.0, busy=True, policy_version=3, gauges=(("x", 1.0),))
    assert session.due(1.9, lambda: progress) == []
    wanted = Heartbeat(progress=7.0, busy=True, policy_version=3, gauges={"x": 1.0})
    assert session.due(2.0, lambda: progress) == [wanted]
    assert session.due(3.9, lambda: progress) == []
    assert session.due(4.0, lambda: progress) == [wanted]


def test_silence_of_five_beats_means_hello_again():
    session = joined()
    limit = MISSED_BEATS * WELCOME.heartbeat_s
    session.due(limit - 0.1, Progress)
    assert session.joined
    assert session.due(limit + 0.1, Progress) == [replace(HELLO, attempt=1)]
    assert not session.joined
    assert session.received(replace(WELCOME, attempt=1), limit + 0.2)
    assert session.joins == 2


def test_any_message_is_a_sign_of_life():
    session = joined()
    for beat in range(20):
        assert not session.received(Heartbeat(), beat * 4.0)
        assert not any(isinstance(m, Hello) for m in session.due(beat * 4.0, Progress))
    assert session.silent_for(80.0) == 4.0


def test_a_broker_that_does_not_know_us_gets_a_hello_at_once():
    session = joined()
    session.received(Refused(code="unknown_peer", message="?"), 0.5)
    assert not session.joined
    assert session.due(0.5, Progress) == [replace(HELLO, attempt=1)]


def test_of_several_hellos_only_the_last_one_s_welcome_is_a_join():
    session = Session(HELLO, 0.0)
    sent = [message for now in (0.0, 1.0, 2.0) for message in session.due(now, Progress)]
    assert [hello.attempt for hello in sent] == [0, 1, 2]
    joins = [session.received(replace(WELCOME, attempt=hello.attempt), 2.5) for hello in sent]
    assert joins == [False, False, True]
    assert (session.joined, session.joins) == (True, 1)


def test_a_slow_broker_is_given_time_to_answer_the_last_hello():
    session = Session(HELLO, 0.0)
    session.due(0.0, Progress)
    session.due(1.0, Progress)
    assert not session.received(WELCOME, 1.5)
    # If the peer sent a new Hello now, each answer, 1.5 s late, would never answer the last Hello.
    assert session.due(2.4, Progress) == []
    assert session.received(replace(WELCOME, attempt=1), 2.5)


def test_other_refusals_change_nothing():
    session = joined()
    session.received(Refused(code="queue_full", message="?"), 0.5)
    assert session.joined


@pytest.mark.parametrize("heartbeat_s", [0.0, -1.0, math.nan, math.inf, 1e308])
def test_whatever_rhythm_is_asked_for_a_peer_neither_floods_nor_forgets_the_broker(heartbeat_s):
    session = Session(HELLO, 0.0)
    session.due(0.0, Progress)
    assert session.received(replace(WELCOME, heartbeat_s=heartbeat_s), 0.0)
    session.due(LONGEST_BEAT_S, Progress)
    assert session.due(LONGEST_BEAT_S, Progress) == []
    assert type(session.due((MISSED_BEATS + 1) * LONGEST_BEAT_S, Progress)[0]) is Hello


def test_another_connection_means_joining_again():
    session = Session(HELLO, now=0.0)
    session.due(0.0, Progress)
    session.received(WELCOME, now=0.1)
    session.reconnected(now=1.0)
    assert not session.joined
    assert session.due(1.0, Progress) == [replace(HELLO, attempt=1)]
    assert session.received(replace(WELCOME, attempt=1), now=1.1)
    assert session.joins == 2


def test_what_was_answered_on_the_connection_before_is_no_join():
    session = Session(HELLO, now=0.0)
    session.due(0.0, Progress)
    session.reconnected(now=0.1)
    # This answer was here already, but not yet read.
    assert not session.received(WELCOME, now=0.1)
    assert session.due(0.1, Progress) == [replace(HELLO, attempt=1)]
    assert session.received(replace(WELCOME, attempt=1), now=0.2)


def test_the_policy_version_of_the_last_welcome_is_known_while_joining_again():
    session = Session(HELLO, now=0.0)
    session.due(0.0, Progress)
    session.received(replace(WELCOME, policy_version=19), now=0.1)
    session.reconnected(now=1.0)
    assert (session.joined, session.policy_version) == (False, 19)


BLOCKED = "short messages pass, one of 1,400 bytes did not, 2 times in a row"


def connection(session, now, *, passes):
    """Join, send a long message, and let twelve seconds pass, in which heartbeats are answered if it ``passes``."""
    for _ in session.due(now, Progress):
        session.received(replace(WELCOME, attempt=session._attempts - 1), now)
    assert session.joined
    session.sent(300, now)
    session.sent(1_400, now + 0.2)
    notes = []
    for second in range(1, 13):
        for message in session.due(now + second, Progress):
            if isinstance(message, Heartbeat):
                notes.append(message.note)
                if passes:
                    session.received(Heartbeat(), now + second)
    return notes


def test_a_path_that_loses_large_packets_is_named_once_it_has_happened_twice():
    session = Session(HELLO, 0.0)
    connection(session, 0.0, passes=False)
    assert connection(session, 13.0, passes=False)[0] == "", "once may be a partition"
    assert BLOCKED in session.long.trouble
    notes = connection(session, 26.0, passes=True)
    assert notes[0].startswith(BLOCKED)
    assert notes[-1] == "", "the path is open again"
    connection(session, 40.0, passes=False)
    assert session.long.trouble == "", "it counts anew"


def test_a_broker_that_is_gone_is_no_matter_of_size():
    session = Session(HELLO, 0.0)
    for start in range(0, 60, 11):
        session.due(float(start), Progress)
        session.received(replace(WELCOME, attempt=session._attempts - 1), float(start))
        # Short messages alone were under way when it went.
        session.sent(300, start + 0.2)
        for second in range(1, 11):
            session.due(float(start + second), Progress)
    assert session.long.trouble == ""


def test_messages_that_leave_together_count_together():
    session = joined()
    for now in (1.0, 11.0):
        for i in range(5):
            session.sent(300, now + i / 100)
        assert any(isinstance(message, Heartbeat) for message in session.due(now + 3.0, Progress))
        session.reconnected(now + 9.0)
        session.due(now + 9.0, Progress)
        session.received(replace(WELCOME, attempt=session._attempts - 1), now + 9.1)
    assert "one of 1,500 bytes did not" in session.long.trouble


def test_losses_before_a_heartbeat_do_not_blame_the_path():
    long = LongMessages()
    for start in (0.0, 7.0, 14.0):
        long.sent(5_000, start)
        long.lost()
    assert long.trouble == ""
    for start in (21.0, 28.0):
        long.sent(5_000, start)
        long.beaten()
        long.lost()
    assert "2 times in a row" in long.trouble
