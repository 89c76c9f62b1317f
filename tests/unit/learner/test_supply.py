"""Batches keep coming for every kind of unit, with a real exchange and broker state, without sockets."""

import queue
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from learner.curriculum import Curriculum
from learner.intake.session import BrokerSession
from learner.settings.learner import LearnerConfig
from learner.trajectory import newest_version
from protocol.messages.episodes import (
    CheckpointWanted,
    Deliver,
    Dropped,
    Held,
    LeaseTask,
    Reward,
    TaskCredit,
    TaskRejected,
    Turn,
)
from protocol.messages.peers import PublishWeights, Refused
from tests.broker_driver import Driver

DELIVER = {"groups": "group", "trajectories": "trajectory", "windows": "segment"}
EPISODES = 6


class Supply:
    """The learner's link to a broker whose one actor sends one segment whenever the learner waits."""

    observed = False
    """Whether an observation stands before each segment's answer, so that episodes have turns."""

    def __init__(self, train_on, *, lag, seed, trouble):
        self.rng, self.trouble = np.random.default_rng(seed), trouble
        self.driver = Driver(lag=lag, heartbeat_s=1000.0)
        self.driver.learner(credit=0, deliver=DELIVER[train_on], epoch=0)
        self.driver.actor(tasks=EPISODES)
        self.inbox, self.session, self.version = self, SimpleNamespace(joined=True), 0
        self.running: dict[str, tuple[LeaseTask, int, int]] = {}
        """Lease, next index and number of segments of each running episode, by lease id."""
        self.queued: deque = deque([None])
        self.joins = 1

    def send(self, message, join=None):
        if join in (None, self.joins):
            self.driver.say("learner", message)

    def publish(self, version):
        self.version = version
        self.send(PublishWeights(epoch=0, version=version, manifest="m"))

    def hear(self):
        """Move the broker's messages into the inbox."""
        for message in self.driver.take("learner", (Deliver, Dropped, Refused, Held, CheckpointWanted)):
            frames = self.driver.frames[message.unit_id] if isinstance(message, Deliver) else []
            self.queued.append((message, [frame for pair in frames for frame in pair]))

    def get_nowait(self):
        self.hear()
        if not self.queued:
            raise queue.Empty
        return self.queued.popleft()

    def get(self, timeout):
        self.go_on()
        return self.get_nowait()

    def go_on(self):
        """Continue an episode, chosen at random."""
        self.take_leases()
        if self.running:
            self.move(str(self.rng.choice(list(self.running))))
        else:
            # The broker offers a lost task again after a while.
            self.driver.wait(1.5, beating=("actor", "learner"))

    def take_leases(self):
        for lease in self.driver.leases():
            self.running.setdefault(lease.lease_id, (lease, 0, int(self.rng.integers(1, 4))))

    def move(self, lease_id):
        """Send the next segment of an episode; in trouble, the actor may lose the episode, or it may fail."""
        lease, index, length = self.running.pop(lease_id)
        if self.trouble and self.rng.random() < 0.1:
            self.driver.say("actor", TaskRejected(lease_id=lease_id, reason="lost"))
            self.driver.say("actor", TaskCredit(tasks=1))
            return
        last = index == length - 1
        failed = self.trouble and last and self.rng.random() < 0.2
        status = ("failed" if failed else "finished") if last else "unfinished"
        sizes = {"tokens": 4, "offset": 0} if index == 0 else {"tokens": 2, "offset": 2 + 2 * index}
        if self.observed:
            at = 4 * index
            turns = [Turn(2 * index, at, at + 2, False), Turn(2 * index + 1, at + 2, at + 4, True)]
            sizes = {"tokens": 4, "offset": at, "turns": turns}
        reward = [Reward("score", 1, float(self.rng.random()))] if last else []
        extra = {"correct": bool(self.rng.random() < 0.3), "hints": ["solution"]} if last else {}
        answer = self.driver.segment(
            "actor", lease, index, status=status, version=self.version, rewards=reward, extra=extra, **sizes
        )
        assert answer.status == "stored", answer
        if last:
            self.driver.say("actor", TaskCredit(tasks=1))
        else:
            self.running[lease_id] = lease, index + 1, length


@pytest.mark.parametrize("trouble", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("train_on", ["groups", "trajectories", "windows"])
def test_batches_keep_coming(train_on, lag, trouble):
    config = LearnerConfig(
        group_size=4,
        batch_trajectories=8,
        max_policy_lag=lag,
        train_on=train_on,
        steps=25,
        start_timeout_s=60.0,
        data_timeout_s=60.0,
    )
    supply = Supply(train_on, lag=lag, seed=lag, trouble=trouble)
    exchange = BrokerSession(supply, Curriculum("e", config), config, lockstep=False, stop_reason=lambda: "")
    for step in range(config.steps):
        groups = exchange.collect(step=step, version=step)
        assert len(groups) == (2 if train_on == "groups" else 8)
        assert all(newest_version(group.trajectories) >= step - lag for group in groups)
        supply.publish(step + 1)
        exchange.commit(groups, step=step + 1)
        under_way = sum(map(len, exchange.curriculum.outstanding.values()))
        assert under_way <= (lag + 1) * 8
        assert len(exchange.intake.open) <= under_way
        assert supply.driver.balanced()
    assert not [m for m in supply.driver.got("learner", Refused)]


def test_batches_keep_coming_in_lockstep_when_members_fail():
    config = LearnerConfig(
        group_size=4,
        batch_trajectories=8,
        max_policy_lag=0,
        forced_lag=2,
        train_on="trajectories",
        steps=12,
        start_timeout_s=60.0,
        data_timeout_s=60.0,
    )
    supply = Supply("trajectories", lag=2, seed=0, trouble=True)
    exchange = BrokerSession(supply, Curriculum("e", config), config, lockstep=True, stop_reason=lambda: "")
    for step in range(config.steps):
        groups = exchange.collect(step=step, version=step)
        versions = {v for g in groups for v in g.trajectories[0].policy_version.tolist()}
        assert versions == {max(0, step - 2)}
        supply.publish(step + 1)
        exchange.commit(groups, step=step + 1)
    assert exchange.intake.counts.total("failed") > 0


def test_a_learner_that_waits_says_for_what_and_how_long():
    link = Supply("groups", lag=1, seed=0, trouble=False)
    config = LearnerConfig(group_size=2, batch_trajectories=4, max_policy_lag=1, evaluation_tasks=0)
    exchange = BrokerSession(link, Curriculum("e", config), config, lockstep=False, stop_reason=lambda: "")
    said = []
    original = link.get
    link.get = lambda timeout: (said.append(dict(exchange.gauges())), original(timeout))[1]
    exchange.collect(step=0, version=0)
    assert said[0].keys() == {"waiting_seconds", "units_here", "units_wanted"}
    assert (said[0]["units_here"], said[0]["units_wanted"]) == (0.0, 2.0)
    assert exchange.gauges() == ()
