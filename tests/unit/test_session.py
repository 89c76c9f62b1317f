"""The peer's side of a connection: join, beat, join again."""

from protocol.messages import Heartbeat, Hello, Refused, Welcome
from protocol.session import HELLO_RETRY_S, MISSED_BEATS, Progress, Session

HELLO = Hello(role="actor", peer="a", incarnation=1)
WELCOME = Welcome(run="r", epoch=0, heartbeat_s=2.0, policy_version=0)


def joined(now=0.0):
    session = Session(HELLO, now)
    assert session.due(now, Progress()) == [HELLO]
    assert session.received(WELCOME, now)
    return session


def test_hello_is_repeated_until_a_welcome_comes():
    session = Session(HELLO, 0.0)
    sent = [now for now in range(5) for _ in session.due(float(now) * HELLO_RETRY_S, Progress())]
    assert sent == [0, 1, 2, 3, 4]
    assert not session.joined
    assert session.due(4.5 * HELLO_RETRY_S, Progress()) == []


def test_heartbeats_follow_the_broker_s_rhythm_and_carry_progress():
    session = joined()
    progress = Progress(progress=7.0, busy=True, policy_version=3, gauges=(("x", 1.0),))
    assert session.due(1.9, progress) == []
    wanted = Heartbeat(progress=7.0, busy=True, policy_version=3, gauges={"x": 1.0})
    assert session.due(2.0, progress) == [wanted]
    assert session.due(3.9, progress) == []
    assert session.due(4.0, progress) == [wanted]


def test_silence_of_five_beats_means_hello_again():
    session = joined()
    limit = MISSED_BEATS * WELCOME.heartbeat_s
    session.due(limit - 0.1, Progress())
    assert session.joined
    assert session.due(limit + 0.1, Progress()) == [HELLO]
    assert not session.joined
    assert session.received(WELCOME, limit + 0.2)
    assert session.joins == 2


def test_any_message_is_a_sign_of_life():
    session = joined()
    for beat in range(20):
        assert not session.received(Heartbeat(), beat * 4.0)
        assert session.due(beat * 4.0, Progress()) != [HELLO]
    assert session.silent_for(80.0) == 4.0


def test_a_broker_that_does_not_know_us_gets_a_hello_at_once():
    session = joined()
    session.received(Refused(code="unknown_peer", message="?"), 0.5)
    assert not session.joined
    assert session.due(0.5, Progress()) == [HELLO]


def test_other_refusals_change_nothing():
    session = joined()
    session.received(Refused(code="queue_full", message="?"), 0.5)
    assert session.joined
