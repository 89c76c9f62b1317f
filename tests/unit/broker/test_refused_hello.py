"""A Hello that is refused takes nothing from the process that has the name."""

import pytest

from broker.config import BrokerConfig
from broker.output_commit import OutputCommit
from broker.service import Identities, Service
from protocol.codec import decode, encode
from protocol.messages.episodes import Deliver, DeliveryCredit, PutTasks, TaskCredit
from protocol.messages.peers import Heartbeat, Hello, Refused, Welcome
from protocol.security.keys import Principal
from tests.broker_driver import group, segment_frames

LEARNER, ACTOR = Principal("learner", "learner"), Principal("actor", "actor")


class AllMay:
    """An allow-list without an objection."""

    class allowed:
        @staticmethod
        def objection(who, peer):
            return ""


class Socket:
    """A stand-in for the broker's ROUTER: a list of (connection, message)."""

    pumping = True

    def __init__(self):
        self.sent = []

    def send(self, frames):
        self.sent.append((frames[0], decode([bytes(frame) for frame in frames[1:]])[0]))

    def connection(self):
        return None


@pytest.fixture
def broker(tmp_path):
    output_commit = OutputCommit.open(BrokerConfig(), "run", 4, tmp_path / "journal")
    yield Broker(output_commit)
    output_commit.close()


class Broker:
    """A broker with keys and a journal, on a stand-in for its socket."""

    def __init__(self, output_commit):
        self.service = Service(BrokerConfig(), output_commit, None, None)
        self.service._peers.identities = Identities(AllMay())
        output_commit.address = self.service._peers.identities.address
        self.service._peers.socket = self.socket = Socket()

    def say(self, route, who, message, *, flush=True):
        return self.frames(route, who, encode(message), flush=flush)

    def frames(self, route, who, frames, *, flush=True):
        """Return what the broker sends in answer, as pairs of connection and message."""
        self.service._received([route, *frames], who)
        if flush:
            self.service._after_batch()
        sent, self.socket.sent = self.socket.sent, []
        return sent

    def learner(self, route, epoch, **options):
        hello = Hello(role="learner", peer="learner", incarnation=epoch, epoch=epoch, lineage=1)
        return self.say(route, LEARNER, hello, **options)


def a_closed_group(broker):
    """Have an actor finish one trajectory. Return the broker's answers."""
    broker.say(b"a1", ACTOR, Hello(role="actor", peer="actor", incarnation=1))
    broker.say(b"a1", ACTOR, TaskCredit(tasks=1))
    tasks = PutTasks(tasks=group("g", 1))
    (lease,) = [m for route, m in broker.say(b"new", LEARNER, tasks) if route == b"a1"]
    return broker.frames(b"a1", ACTOR, segment_frames(lease))


def test_a_learner_of_a_lower_epoch_gets_its_refusal_and_nothing_of_the_living_one(broker):
    broker.learner(b"old", 1)
    broker.learner(b"new", 2)
    broker.say(b"new", LEARNER, DeliveryCredit(units=9))
    ((route, refused),) = broker.learner(b"old", 1)
    assert (route, type(refused), refused.code, refused.fatal) == (b"old", Refused, "stale_incarnation", True)
    assert [route for route, m in a_closed_group(broker) if isinstance(m, Deliver)] == [b"new"]
    ((route, beat),) = broker.say(b"new", LEARNER, Heartbeat())
    assert (route, type(beat)) == (b"new", Heartbeat)
    ((route, refused),) = broker.say(b"old", LEARNER, DeliveryCredit(units=9))
    assert (route, refused.code) == (b"old", "unknown_peer")


def test_what_waits_for_the_journal_goes_to_the_process_it_was_meant_for(broker):
    broker.learner(b"old", 1, flush=False)
    answers = broker.learner(b"new", 2)
    welcomes = {route: m.epoch for route, m in answers if isinstance(m, Welcome)}
    assert welcomes == {b"old": 1, b"new": 2}


def test_a_broker_without_keys_answers_by_name(tmp_path):
    output_commit = OutputCommit.open(BrokerConfig(), "run", 4, tmp_path / "journal")
    service = Service(BrokerConfig(), output_commit, None, None)
    service._peers.socket = socket = Socket()
    hello = Hello(role="actor", peer="actor", incarnation=2)
    service._received([b"actor", *encode(hello)])
    service._after_batch()
    assert Welcome in {type(message) for route, message in socket.sent if route == b"actor"}
    output_commit.close()
