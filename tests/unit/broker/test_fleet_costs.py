"""A fleet of hundreds of peers costs the broker little: bytes and CPU, without sockets."""

import sys
import time

import pytest

from broker.core.dispatch import Dispatcher
from broker.service import Encoder
from broker.status import status
from protocol.messages.fields import MAX_SOURCES
from protocol.messages.peers import Generators, Goodbye, Heartbeat, Hello, PublishWeights
from tests.broker_driver import config

ENDPOINT = "tcp://10.20.{}.{}:45001"


class Fleet:
    """A Dispatcher with many peers, which counts what it sends."""

    def __init__(self, generators, actors=0):
        self.now = 0.0
        self.reset()
        self.dispatcher = Dispatcher(config(), run="run", max_policy_lag=4, now=self.now)
        self.generators = [f"generator-host{i}-0" for i in range(generators)]
        self.actors = [f"actor-{i}" for i in range(actors)]
        self.say("learner", Hello(role="learner", peer="learner", incarnation=1, epoch=1))
        for name in self.actors:
            self.say(name, Hello(role="actor", peer=name, incarnation=1))
        for i, name in enumerate(self.generators):
            place = i >> 8, i & 255
            self.say(
                name,
                Hello(
                    role="generator",
                    peer=name,
                    incarnation=1,
                    endpoint=ENDPOINT.format(*place),
                    weights_url=f"http://10.20.{place[0]}.{place[1]}:5757",
                    passes_on=True,
                ),
            )
        self.tick(3.0)
        self.reset()

    def reset(self):
        self.bytes, self.sent = 0, []

    def say(self, name, message):
        self._leave(self.dispatcher.handle(name, message, [], self.now))

    def tick(self, seconds):
        """Let time pass. All peers beat once a second."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            for peer in self.dispatcher.state.peers:
                self.say(peer.name, Heartbeat(policy_version=peer.heartbeat.policy_version))
            self._leave(self.dispatcher.tick(self.now))

    def _leave(self, actions):
        encoder = Encoder()
        for action in actions:
            self.bytes += sum(map(len, encoder.frames(action)))
            self.sent.append((action.peer, action.message))

    def publish(self, version):
        """Publish a version, which all generators report a moment later. Return the seconds of CPU."""
        before = time.process_time()
        message = PublishWeights(epoch=1, version=version, manifest=f"/dev/shm/v{version}", url="http://h")
        self.say("learner", message)
        for name in self.generators:
            self.say(name, Heartbeat(policy_version=version))
        self._leave(self.dispatcher.tick(self.now))
        return time.process_time() - before

    def lists(self):
        return [peer for peer, message in self.sent if isinstance(message, Generators)]


def test_a_version_costs_messages_in_the_number_of_peers_and_not_in_their_product():
    fleet = Fleet(generators=256, actors=256)
    cpu = []
    for version in range(1, 6):
        fleet.reset()
        fleet.now += 0.01
        cpu.append(fleet.publish(version))
        assert len(fleet.sent) <= 2 * 256
        assert fleet.bytes < 5_000_000
    # The least of five: other work on the machine adds to the rest.
    assert min(cpu) < 0.05


def test_generators_that_join_at_once_are_listed_together():
    fleet = Fleet(generators=0, actors=100)
    for i in range(60):
        name = f"g{i}"
        endpoint = ENDPOINT.format(0, i)
        fleet.say(name, Hello(role="generator", peer=name, incarnation=1, endpoint=endpoint))
    fleet.tick(1.0)
    # The first list leaves at once, so that a small fleet waits for nothing.
    assert 2 * 100 <= len(fleet.lists()) <= 4 * 100
    last = [message for _, message in fleet.sent if isinstance(message, Generators)][-100:]
    assert {len(message.generators) for message in last} == {60}
    fleet.reset()
    for i in range(30):
        fleet.say(f"g{i}", Goodbye())
    fleet.tick(1.0)
    last = [message for _, message in fleet.sent if isinstance(message, Generators)][-100:]
    assert {len(message.generators) for message in last} == {30}
    assert len(fleet.lists()) <= 4 * 100


@pytest.mark.parametrize("speaker", ["generator-host0-0", "actor-0", "learner"])
def test_a_heartbeat_costs_the_same_with_one_generator_and_with_a_thousand(speaker):
    costs = set()
    for count in (1, 1000):
        fleet = Fleet(generators=count, actors=1)
        fleet.publish(1)
        fleet.now += 5.1
        # The version is not the newest, so the broker announces the newest one again.
        costs.add(instructions(lambda fleet=fleet: fleet.say(speaker, Heartbeat(policy_version=0))))
    few, many = min(costs), max(costs)
    # An announcement names as many sources as fit.
    assert many - few < 40 * MAX_SOURCES


def instructions(call):
    """Return the number of bytecode instructions that a call executes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_two_thousand_actors_and_generators_have_64_connections_each_and_an_event_reaches_few():
    fleet = Fleet(generators=0)
    began = time.process_time()
    # An eighth joins in each step, so that the lists of many moments are counted.
    for part in range(8):
        for i in range(part * 250, part * 250 + 250):
            fleet.actors.append(f"actor-{i}")
            fleet.generators.append(f"generator-{i}")
            fleet.say(f"actor-{i}", Hello(role="actor", peer=f"actor-{i}", incarnation=1, host=f"h{i}"))
            fleet.say(
                f"generator-{i}",
                Hello(
                    role="generator",
                    peer=f"generator-{i}",
                    incarnation=1,
                    host=f"h{i}",
                    endpoint=ENDPOINT.format(i >> 8, i & 255),
                ),
            )
        fleet.now += 2.0
        fleet._leave(fleet.dispatcher.tick(fleet.now))
    joining_s = time.process_time() - began
    told = {
        peer: [g.peer for g in message.generators]
        for peer, message in fleet.sent
        if isinstance(message, Generators)
    }
    assert len(told) == 2_000
    assert all(64 <= len(names) <= 72 for names in told.values())
    assert sum(map(len, told.values())) <= 2_000 * 66
    assert set().union(*told.values()) == set(fleet.generators), "nobody is idle"
    assert all(f"generator-{i}" in told[f"actor-{i}"] for i in range(2_000)), (
        "a host's own generators come first"
    )
    assert joining_s < 30.0

    def event(message, name):
        fleet.reset()
        fleet.now += 60.0
        before = time.process_time()
        fleet.say(name, message)
        fleet._leave(fleet.dispatcher.follow(fleet.now))
        return len(fleet.lists()), time.process_time() - before

    lists, seconds = zip(*(event(Goodbye(), f"generator-{i}") for i in range(20)), strict=True)
    # About 64 actors have a generator.
    assert max(lists) < 128
    assert min(seconds) < 0.1
    fleet.reset()
    for name in fleet.actors[100:200]:
        fleet.say(name, Goodbye())
    fleet.now += 60.0
    fleet._leave(fleet.dispatcher.tick(fleet.now))
    assert len(fleet.lists()) < 2_000


def test_a_generator_too_many_is_named_where_one_actor_cannot_know_all():
    fleet = Fleet(generators=2_000, actors=1)
    page = status(fleet.dispatcher, fleet.now)
    unused = page["fleet"]["generators_unused"]
    assert 200 < unused < 1_000
    assert any(f"{unused} generators wait for more actors" in line for line in page["waits"])
    for i in range(1, 9):
        fleet.say(f"actor-{i}", Hello(role="actor", peer=f"actor-{i}", incarnation=1))
    fleet.tick(2.0)
    assert status(fleet.dispatcher, fleet.now)["fleet"]["generators_unused"] == 0
