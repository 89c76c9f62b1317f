"""The tree of relays: its shape, the time that a version takes to all hosts, and what announcements name."""

import random

import pytest

from broker.core.dispatch import Dispatcher
from broker.core.relays import FAN_OUT, REMIND_S, REST_S, RelayTree
from protocol.messages.peers import Goodbye, Heartbeat, Hello, PublishWeights, SourceComplaint, WeightsReady
from tests.broker_driver import config

LEARNER = "http://learner:5757"


@pytest.mark.parametrize("seed", range(5))
def test_each_host_has_one_way_to_the_learner_and_each_relay_few_children(seed):
    luck, tree = random.Random(seed), RelayTree()
    relays = [f"r{number}" for number in range(luck.randrange(200))]
    leaves = [f"l{number}" for number in range(luck.randrange(200))]
    racks = luck.choice([[""], ["", "a", "b"], list("abcdefgh")])
    for host in relays:
        tree.add(host, luck.choice(racks))
    for host in leaves:
        tree.add(host, luck.choice(racks), passes_on=False)
    parents = list(tree.parents.values())
    assert len(parents) == len(relays) + len(leaves)
    assert not set(parents) & set(leaves)
    assert all(parents.count(host) <= FAN_OUT for host in relays)
    # Only when all places are taken does the learner serve more.
    places = FAN_OUT * (1 + len(relays))
    assert parents.count("") <= FAN_OUT + max(0, len(parents) - places)
    assert all(len(set(tree.ancestors(host))) == len(tree.ancestors(host)) for host in tree.parents)


def test_hosts_of_a_rack_fetch_from_each_other():
    tree, rack = RelayTree(), {}
    for number in range(40):
        rack[f"h{number}"] = f"rack{number % 5}"
    for host, label in rack.items():
        tree.add(host, label)
    crossing = [host for host, parent in tree.parents.items() if parent and rack[parent] != rack[host]]
    assert len(crossing) == 5 - FAN_OUT


def seconds_to_all(tree, nbytes, rate, window):
    """Return when each host has all bytes: each server sends at ``rate``, in equal parts to those that can take."""
    step, now = 0.01, 0.0
    have, done = dict.fromkeys(tree.parents, 0.0), {}
    while len(done) < len(have):
        now += step
        takers = {}
        for host, parent in tree.parents.items():
            there = nbytes if not parent or parent in done else have[parent] - window
            if host not in done and have[host] < there:
                takers.setdefault(parent, []).append(host)
        for children in takers.values():
            for host in children:
                have[host] = min(nbytes, have[host] + step * rate / len(children))
        done |= {host: now for host, held in have.items() if held >= nbytes and host not in done}
    return done


def test_125_hosts_have_14_gb_within_a_minute():
    tree = RelayTree()
    for number in range(125):
        tree.add(f"h{number}")
    # What four connections with eight chunks of a MiB each have under way is not passed on yet.
    done = seconds_to_all(tree, 14e9, 0.6e9, window=32 * 2**20)
    assert max(done.values()) < 60.0
    assert max(done.values()) <= 1.1 * min(done.values())
    # From the learner alone each waits for all others.
    assert 125 * 14e9 / 0.6e9 > 48 * 60


class Fleet:
    def __init__(self, count, **hello):
        self.now, self.sent = 0.0, {}
        self.dispatcher = Dispatcher(config(), run="run", max_policy_lag=4, now=self.now)
        self.say("learner", Hello(role="learner", peer="learner", incarnation=1, epoch=1, host="head"))
        for number in range(count):
            self.join(number, **hello)

    def join(self, number, **hello):
        told = {"passes_on": True, "host": f"h{number}", "weights_url": self.url(number), **hello}
        self.say(self.name(number), Hello(role="generator", peer=self.name(number), incarnation=1, **told))

    def name(self, number):
        return f"generator-h{number}-0"

    def url(self, number):
        return f"http://h{number}:1"

    def say(self, name, message):
        self.now += 0.001
        for action in self.dispatcher.handle(name, message, [], self.now):
            if isinstance(action.message, WeightsReady):
                self.sent[action.peer] = action.message

    def publish(self, version):
        self.say("learner", PublishWeights(epoch=1, version=version, manifest="/m", url=LEARNER))

    def sources(self, number):
        return self.sent[self.name(number)].sources

    def complain(self, number, about, *, lied, version=0):
        complaint = SourceComplaint(self.url(about), lied)
        self.say(self.name(number), Heartbeat(policy_version=version, complaints=[complaint]))


def test_the_first_ask_the_learner_and_the_others_the_relays_above_them():
    fleet = Fleet(7)
    fleet.publish(1)
    assert fleet.sources(0) == fleet.sources(1) == [LEARNER]
    assert fleet.sources(2) == [fleet.url(0), LEARNER]
    assert fleet.sources(6) == [fleet.url(2), fleet.url(0), LEARNER]
    assert fleet.sent[fleet.name(6)].ordered
    # A host that joins later takes the next place. The children of one that is gone ask the relay above it.
    fleet.join(7)
    assert fleet.sources(7) == [fleet.url(2), fleet.url(0), LEARNER]
    fleet.say(fleet.name(2), Goodbye())
    fleet.now += REMIND_S + 1
    fleet.say(fleet.name(6), Heartbeat())
    assert fleet.sources(6) == [fleet.url(0), LEARNER]


def test_generators_of_a_host_have_one_place_and_those_beside_the_learner_none():
    fleet = Fleet(0)
    fleet.join(0, host="head")
    for number in (1, 2):
        fleet.join(number, host="same")
    for number in (3, 4):
        fleet.join(number)
    fleet.publish(1)
    assert fleet.sources(0) == fleet.sources(1) == fleet.sources(2) == fleet.sources(3) == [LEARNER]
    assert fleet.sources(4) == [fleet.url(1), LEARNER]


def test_a_peer_that_serves_whole_versions_only_is_no_relay():
    fleet = Fleet(3, passes_on=False)
    fleet.publish(1)
    assert [fleet.sources(number) for number in range(3)] == [[LEARNER]] * 3


def asked(fleet, about, count):
    """Return who is sent to a relay."""
    return [number for number in range(count) if fleet.url(about) in fleet.sources(number)]


def test_a_relay_that_lies_to_two_hosts_is_left_out_until_it_starts_again(caplog):
    fleet = Fleet(6)
    fleet.publish(1)
    fleet.complain(2, about=0, lied=True)
    assert f"{fleet.name(0)} has sent wrong weights to {fleet.name(2)}" in caplog.text
    fleet.complain(3, about=0, lied=True)
    assert "to 2 hosts" in caplog.text
    fleet.complain(3, about=0, lied=True)
    assert caplog.text.count("wrong weights") == 2
    fleet.now += 10 * REST_S
    fleet.publish(2)
    assert not asked(fleet, 0, 6)
    assert fleet.sources(3) == [fleet.url(1), LEARNER]
    # As a new process it is trusted again, though those hosts go on to say what they have seen.
    fleet.say(fleet.name(0), Goodbye())
    fleet.join(0)
    for number in (1, 4, 5):
        fleet.say(fleet.name(number), Goodbye())
    for number in (1, 4, 5, 6):
        fleet.join(number)
    for number in (2, 3):
        fleet.complain(number, about=0, lied=True)
    fleet.publish(3)
    assert caplog.text.count("wrong weights") == 2
    assert asked(fleet, 0, 7) == [6]


def test_a_broker_that_starts_again_hears_of_a_liar_that_joins_last(caplog):
    fleet = Fleet(0)
    for number in (1, 2):
        fleet.join(number)
        fleet.complain(number, about=0, lied=True)
    assert not caplog.text
    fleet.join(0)
    for number in (1, 2):
        fleet.complain(number, about=0, lied=True)
    assert "to 2 hosts" in caplog.text


def test_one_host_cannot_have_a_relay_left_out(caplog):
    fleet = Fleet(7)
    fleet.publish(1)
    assert fleet.url(0) in fleet.sources(2)
    fleet.complain(2, about=0, lied=True)
    fleet.publish(2)
    assert not asked(fleet, 0, 7), "the first complaint counts at once"
    # It goes on to say so, and so does a second generator of that host.
    fleet.join(7, host="h2")
    for _ in range(5):
        fleet.now += REST_S / 4
        for number in (2, 7):
            fleet.complain(number, about=0, lied=True)
    fleet.now += REST_S
    fleet.publish(3)
    others = asked(fleet, 0, 7)
    assert others
    assert 2 not in others, "it is not sent there again"
    assert caplog.text.count("wrong weights") == 1


def test_a_complaint_that_stands_is_counted_once():
    fleet = Fleet(6)
    fleet.publish(1)
    for _ in range(5):
        fleet.complain(2, about=0, lied=False)
        fleet.now += REST_S / 4
    fleet.publish(2)
    assert fleet.url(0) in fleet.sources(2)
    # It is over, and the relay fails once more.
    fleet.say(fleet.name(2), Heartbeat(policy_version=2))
    fleet.complain(2, about=0, lied=False)
    fleet.publish(3)
    assert not asked(fleet, 0, 6)


def test_a_relay_that_failed_is_a_leaf_for_a_while():
    fleet = Fleet(6)
    fleet.publish(1)
    assert fleet.url(0) in fleet.sources(2)
    fleet.complain(2, about=0, lied=False)
    fleet.publish(2)
    assert not any(fleet.url(0) in fleet.sources(number) for number in range(6))
    fleet.now += REST_S
    fleet.publish(3)
    assert fleet.url(0) in fleet.sources(2)


def test_a_complaint_about_nobody_changes_nothing(caplog):
    fleet = Fleet(3)
    fleet.publish(1)
    complaint = SourceComplaint(LEARNER, lied=True)
    fleet.say(fleet.name(0), Heartbeat(complaints=[complaint]))
    fleet.publish(2)
    assert fleet.sources(2) == [fleet.url(0), LEARNER]
    assert not caplog.text
