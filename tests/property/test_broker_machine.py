"""Test the broker under arbitrary actors, learners, crashes and delays, with a virtual clock.

The model records what the outside world may rely on: which segments were acknowledged, what was delivered
under which lease, and how much credit was granted.
"""

import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol.codec import decode_segment
from protocol.messages.episodes import (
    CancelTask,
    Checkpointed,
    Commit,
    Deliver,
    DeliveryCredit,
    Dropped,
    LeaseTask,
    SegmentAck,
    SegmentCredit,
    TaskCredit,
    TaskRejected,
)
from protocol.messages.peers import Goodbye, Heartbeat, PublishWeights
from protocol.version_line import MAX_FORKS
from tests.broker_driver import Driver, evaluation, group, segment_frames
from tests.property.effort import EFFORT

ACTORS = ("a", "b", "c")
WINDOW = 4
MAX_SEGMENTS = 24
CREDIT = 3


class Run:
    """An episode in an actor: its lease, and the number of segments sent."""

    def __init__(self, lease):
        self.lease, self.sent = lease, 0


class Actor:
    def __init__(self, name, incarnation):
        self.name, self.incarnation = name, incarnation
        self.credit = 0
        self.runs = {}
        self.ended = set()
        self.progress = 0.0


class BrokerMachine(RuleBasedStateMachine):
    @initialize(unit=st.sampled_from(["group", "trajectory", "segment"]))
    def begin(self, unit):
        self.folder = tempfile.TemporaryDirectory()
        self.driver = Driver(
            lag=2,
            folder=Path(self.folder.name) / "journal",
            max_deliveries=1000,
            segment_credit=WINDOW,
            max_queued_segments=MAX_SEGMENTS,
            max_queued_tasks=30,
            task_lease_s=8.0,
            delivery_lease_s=15.0,
            group_deadline_s=20.0,
            max_attempts=3,
        )
        self.unit = unit
        self.actors = {}
        self.incarnation = 0
        self.epoch = 0
        self.version = 0
        self.line = []
        self.groups = 0
        self.delivery_credit = 0
        self.held = {}
        """Segment keys of each unit delivered to the living learner, by unit id."""
        self.acknowledged = {}
        """Key of every segment acknowledged as stored, with its tokens."""
        self.committed = Counter()
        self.step = self.checkpoint = self.lineage = 0
        self.steps = {}
        """Segment keys committed at each step of the surviving lineage."""
        self.ended = set()
        self.start_learner()

    # --- the outside world --------------------------------------------------------------------------------

    def say(self, peer, message):
        self.driver.say(peer, message)
        self.read()

    def read(self):
        """Hand the broker's messages to their receivers."""
        while any(self.driver.sent.values()):
            # Actors read first, so that a segment is acknowledged before its delivery is read.
            for peer in sorted(self.driver.sent):
                messages, self.driver.sent[peer] = self.driver.sent[peer], []
                for message in messages:
                    if peer == "learner":
                        self.learner_reads(message)
                    elif peer in self.actors:
                        self.actor_reads(self.actors[peer], message)

    def learner_reads(self, message):
        if isinstance(message, Deliver):
            self.delivery_credit -= 1
            assert self.delivery_credit >= 0, "more was delivered than there was credit"
            pairs = self.driver.frames.pop(message.unit_id)
            assert len(pairs) == message.segments
            keys = [self.key_of(header) for header, _ in pairs]
            assert len(set(keys)) == len(keys)
            assert set(keys) <= set(self.acknowledged), "what was not acknowledged was delivered"
            assert not any(self.committed[key] > 0 for key in keys), "delivered after it was committed"
            assert not self.ended & set(keys), "of a lineage that has ended"
            if message.unit_id in self.held:
                assert message.redelivered
                assert self.held[message.unit_id] == keys
            assert not any(set(keys) & set(ks) for unit, ks in self.held.items() if unit != message.unit_id)
            self.held[message.unit_id] = keys
        elif isinstance(message, Dropped):
            assert message.reason in ("stale", "given_up", "deadline")

    def key_of(self, header):
        segment = decode_segment(header)
        return segment.trajectory_id, segment.index

    def actor_reads(self, actor, message):
        match message:
            case LeaseTask():
                # The broker sends a lease again after a Hello.
                actor.runs.setdefault(message.lease_id, Run(message))
            case CancelTask():
                actor.runs.pop(message.lease_id, None)
            case SegmentCredit():
                actor.credit += message.segments
                assert actor.credit <= WINDOW, "more credit than the window"
            case SegmentAck(status="stored"):
                self.acknowledged[message.trajectory_id, message.index] = 3
            case SegmentAck(status="refused"):
                for lease_id, run in list(actor.runs.items()):
                    if run.lease.trajectory_id == message.trajectory_id:
                        del actor.runs[lease_id]

    def start_learner(self, new_lineage=False):
        """Start a learner from its checkpoint, or from nothing with ``new_lineage``.

        Units that were committed after the checkpoint come back. A new lineage gets no old unit.
        """
        self.epoch += 1
        self.held.clear()
        self.delivery_credit = 0
        if new_lineage:
            self.lineage, self.checkpoint = self.epoch, 0
            self.steps.clear()
            self.ended.update(self.acknowledged)
            for actor in self.actors.values():
                actor.ended.update(actor.runs)
        for step in [step for step in self.steps if step > self.checkpoint]:
            self.committed.subtract(self.steps.pop(step))
        self.step = self.checkpoint
        self.say_hello()

    def say_hello(self):
        self.driver.hello(
            "learner",
            "learner",
            self.epoch,
            epoch=self.epoch,
            lineage=self.lineage,
            step=self.checkpoint,
            deliver=self.unit,
        )
        self.add_credit(CREDIT)

    def add_credit(self, units):
        self.delivery_credit += units
        self.say("learner", DeliveryCredit(units=units))

    # --- rules --------------------------------------------------------------------------------------------

    @rule(size=st.integers(1, 3), evaluated=st.booleans())
    def put(self, size, evaluated):
        self.groups += 1
        if evaluated and size == 1:
            self.driver.put(evaluation(f"ev{self.groups}"))
        else:
            self.driver.put(*group(f"g{self.groups}", size, deadline_s=30.0))
        self.read()

    @rule(name=st.sampled_from(ACTORS), tasks=st.integers(0, 4))
    def actor_starts(self, name, tasks):
        """Start a new actor process, whether or not one of this name is alive: a crash and a restart."""
        self.incarnation += 1
        self.actors[name] = Actor(name, self.incarnation)
        self.driver.sent.pop(name, None)
        self.driver.hello("actor", name, self.incarnation)
        self.say(name, TaskCredit(tasks=tasks))

    @rule(name=st.sampled_from(ACTORS))
    def actor_rejoins(self, name):
        """The same process says Hello again, which voids the credit on both sides."""
        actor = self.actors.get(name)
        if actor is not None:
            actor.credit = 0
            self.driver.hello("actor", name, actor.incarnation)
            self.read()

    @rule(name=st.sampled_from(ACTORS), crash=st.booleans())
    def actor_leaves(self, name, crash):
        actor = self.actors.pop(name, None)
        if actor is not None and not crash:
            self.say(name, Goodbye())

    @rule(
        name=st.sampled_from(ACTORS), which=st.integers(0, 9), close=st.booleans(), status=st.integers(0, 2)
    )
    def actor_sends(self, name, which, close, status):
        actor = self.actors.get(name)
        if actor is None or not actor.runs or actor.credit <= 0:
            return
        lease_id = sorted(actor.runs)[which % len(actor.runs)]
        run = actor.runs[lease_id]
        kind = ("finished", "truncated", "failed")[status] if close else "unfinished"
        frames = segment_frames(
            run.lease, run.sent, offset=3 * run.sent, tokens=3, status=kind, version=self.version
        )
        run.sent += 1
        actor.credit -= 1
        if close:
            del actor.runs[lease_id]
        self.driver.say_frames(name, frames)
        self.read()
        if close:
            self.say(name, TaskCredit(tasks=1))

    @rule(name=st.sampled_from(ACTORS), which=st.integers(0, 9))
    def actor_repeats(self, name, which):
        """A duplicate of a segment sent before changes nothing."""
        actor = self.actors.get(name)
        runs = [run for run in actor.runs.values() if run.sent] if actor else []
        if not runs or actor.credit <= 0:
            return
        run = runs[which % len(runs)]
        before = self.driver.dispatcher.state.ledger.stored.segments
        actor.credit -= 1
        index = which % run.sent
        frames = segment_frames(run.lease, index, offset=3 * index, tokens=3, status="unfinished")
        self.driver.say_frames(name, frames)
        self.read()
        assert self.driver.dispatcher.state.ledger.stored.segments == before

    @rule(name=st.sampled_from(ACTORS), which=st.integers(0, 9))
    def actor_skips(self, name, which):
        """A segment is lost in transit."""
        actor = self.actors.get(name)
        if actor is None or not actor.runs or actor.credit <= 0:
            return
        actor.credit -= 1
        run = actor.runs[sorted(actor.runs)[which % len(actor.runs)]]
        self.driver.say_frames(
            name, segment_frames(run.lease, run.sent + 1, offset=3 * run.sent + 3, tokens=3)
        )
        self.read()

    @rule(name=st.sampled_from(ACTORS), draining=st.booleans())
    def actor_rejects(self, name, draining):
        actor = self.actors.get(name)
        if actor is not None and actor.runs:
            lease_id = next(iter(actor.runs))
            del actor.runs[lease_id]
            reason = "draining" if draining else "unknown environment"
            self.say(name, TaskRejected(lease_id=lease_id, reason=reason))

    @rule(which=st.integers(0, 9), trained=st.booleans(), again=st.booleans())
    def learner_commits(self, which, trained, again):
        if not self.held:
            return
        unit_id = sorted(self.held)[which % len(self.held)]
        keys = self.held.pop(unit_id)
        self.step += 1
        self.committed.update(keys)
        self.steps[self.step] = keys
        lists = {"trained": [unit_id]} if trained else {"dropped": [unit_id]}
        for _ in range(1 + again):
            self.say("learner", Commit(epoch=self.epoch, step=self.step, **lists))
        self.add_credit(1)

    @rule(told=st.booleans())
    def learner_checkpoints(self, told):
        """The learner may die before the broker hears of its checkpoint."""
        self.checkpoint = self.step
        if told:
            self.say("learner", Checkpointed(epoch=self.epoch, step=self.step))

    @rule(count=st.integers(1, 3))
    def learner_publishes(self, count):
        self.version += count
        line = self.line[-MAX_FORKS:]
        self.say("learner", PublishWeights(epoch=self.epoch, version=self.version, manifest="m", line=line))

    @rule(new_lineage=st.sampled_from([False, False, False, True]), back=st.integers(0, 5))
    def learner_restarts(self, new_lineage, back):
        """The new learner's weights come from an older version and get a new number."""
        self.start_learner(new_lineage)
        self.line.append((max(0, self.version - back), self.version + 1))
        self.version += 1
        self.learner_publishes(0)

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.journal.close()
            self.folder.cleanup()

    @rule(rotate=st.booleans())
    def broker_is_killed(self, rotate):
        """The broker recovers from its journal; nothing it has sent rests on lost data."""
        self.driver.flush(rotate=rotate)
        self.driver.kill_broker()
        for actor in self.actors.values():
            actor.credit = 0
        self.delivery_credit = 0
        self.say_hello()
        for name, actor in list(self.actors.items()):
            self.driver.hello("actor", name, actor.incarnation)
        self.read()

    @rule()
    def learner_rejoins(self):
        """The same process says Hello again; it keeps the units it held, and gets them again."""
        self.delivery_credit = 0
        self.say_hello()

    @rule(seconds=st.sampled_from([0.5, 3.0, 12.0, 25.0]), progress=st.booleans())
    def time_passes(self, seconds, progress):
        end = self.driver.now + seconds
        while self.driver.now < end:
            self.driver.now += 0.5
            for actor in list(self.actors.values()):
                actor.progress += progress
                self.say(actor.name, Heartbeat(progress=actor.progress, busy=bool(actor.runs)))
            self.say("learner", Heartbeat(progress=0.0, busy=False))
            self.driver._note(self.driver.dispatcher.tick(self.driver.now))
            self.read()

    @precondition(
        lambda self: self.driver.dispatcher.state.tasks.queued + self.driver.dispatcher.state.tasks.leased
    )
    @rule()
    def everything_can_be_finished(self):
        """Whatever has happened, a good actor and a good learner can bring all tasks to an end."""
        for _ in range(400):
            if not self.actors:
                self.actor_starts("a", 4)
            for name, actor in list(self.actors.items()):
                if not actor.runs:
                    self.say(name, TaskCredit(tasks=1))
                for _ in range(len(actor.runs)):
                    self.actor_sends(name, 0, True, 0)
            while self.held:
                self.learner_commits(0, True, False)
            state = self.driver.dispatcher.state
            if not (state.tasks.queued or state.tasks.leased or state.deliveries.units()):
                return
            self.time_passes(0.5, True)
        raise AssertionError("stuck")

    # --- invariants ---------------------------------------------------------------------------------------

    @invariant()
    def the_ledger_closes(self):
        if hasattr(self, "driver"):
            self.driver.balanced()
            ledger = self.driver.dispatcher.state.ledger
            assert ledger.stored.segments == len(self.acknowledged)
            assert ledger.held_tokens == 3 * self.driver.held
            done = ledger.outcomes["trained"].segments + ledger.outcomes["dropped"].segments
            assert done >= sum(self.committed.values())
            assert max(self.committed.values(), default=0) <= 1, "trained twice"
            if not self.lineage:
                assert done == sum(self.committed.values())

    @invariant()
    def no_segment_is_under_two_leases(self):
        if hasattr(self, "driver"):
            deliveries = self.driver.dispatcher.state.deliveries
            keys = Counter(stored.key for unit in deliveries.saved() for stored in unit.segments)
            assert all(count == 1 for count in keys.values())
            assert deliveries.leased_segments <= self.driver.held

    @invariant()
    def memory_is_bounded(self):
        if hasattr(self, "driver"):
            state = self.driver.dispatcher.state
            # Above the bound, the broker grants credit one by one, so that unfinished groups can be finished.
            room = max(0, MAX_SEGMENTS - self.driver.held)
            assert state.flow.outstanding <= room + len(state.flow._credit)
            assert state.tasks.queued <= 30 + len(ACTORS) * 30
            assert len(state.flow._credit) == len(state.peers.of("actor"))
            assert set(state.assembly.trajectories) <= {
                record.trajectory_id for record in state.tasks._live.values()
            }
            assert state.flow.outstanding == sum(max(0, c) for c in state.flow._credit.values())


BrokerMachine.TestCase.settings = settings(max_examples=40 * EFFORT, stateful_step_count=30, deadline=None)
test_broker_machine = BrokerMachine.TestCase
