"""Driver that runs a Dispatcher on a virtual clock, shared by the broker's tests."""

from zlib import crc32

import numpy as np

from broker.config import BrokerConfig
from broker.core.dispatch import Dispatcher
from broker.journal.journal import Journal
from broker.output_commit import JournalStore, recover, snapshot
from protocol.codec import decode, encode, encode_arrays
from protocol.messages.episodes import (
    Checkpointed,
    Commit,
    Deliver,
    DeliveryCredit,
    Dropped,
    LeaseTask,
    PutTasks,
    Segment,
    SegmentAck,
    SegmentCredit,
    Task,
    TaskCredit,
)
from protocol.messages.peers import Heartbeat, Hello, PublishWeights


def config(**settings):
    return BrokerConfig(endpoint="tcp://127.0.0.1:5555", http="127.0.0.1:5556", **settings)


def group(name, size=2, **fields):
    """Return the tasks of one rollout group."""
    return [
        Task(task_id=f"{name}.{i}", env="e", group_id=name, group_size=size, member=i, **fields)
        for i in range(size)
    ]


def evaluation(name):
    return Task(task_id=name, env="e", group_id=name, group_size=1, purpose="eval", min_policy_version=1)


def segment_frames(
    lease, index=0, *, offset=0, tokens=4, action_tokens=2, status="finished", version=0, **changes
):
    """Return the frames of a segment that keeps all rules, except for ``changes`` of its header."""
    task = lease.task
    # What a teacher writes has no version.
    version = -1 if task.policy else version
    fields = {
        "policy": task.policy,
        "trajectory_id": f"{task.task_id}.{lease.attempt}",
        "task_id": task.task_id,
        "group_id": task.group_id,
        "group_size": task.group_size,
        "index": index,
        "offset": offset,
        "tokens": tokens,
        "action_tokens": action_tokens,
        "status": status,
        "purpose": task.purpose,
        "version_min": version if action_tokens else -1,
        "version_max": version if action_tokens else -1,
    }
    arrays = {
        # A note changes the tokens of the prompt, and another note changes them in another way.
        "token_ids": np.arange(tokens, dtype="<i4")
        + (1000 + crc32(task.note.encode()) % 1000 if task.note else 0),
        "action_mask": np.array([0] * (tokens - action_tokens) + [1] * action_tokens, "u1"),
        "logp_behaviour": np.zeros(tokens, "<f4"),
        "policy_version": np.full(tokens, version, "<i4"),
    }
    return encode_arrays(Segment(**{**fields, **changes}), arrays)


class Driver:
    """A broker's Dispatcher, and the messages it has sent to each peer."""

    def __init__(self, lag=4, boot="", folder=None, **settings):
        self.config = config(**settings)
        self.now = 1000.0
        self.lag, self.folder, self.boots = lag, folder, 0
        self.journal = None
        if folder is None:
            self.dispatcher = Dispatcher(self.config, run="run", max_policy_lag=lag, now=self.now, boot=boot)
        else:
            self._recover()
        self.sent = {}
        self.frames = {}

    def _recover(self, *, accept_loss=False):
        self.boots += 1
        self.journal = Journal.open(
            self.folder, run="run", config=self.config.journal, accept_loss=accept_loss
        )
        store = JournalStore(self.journal, self.config.journal.max_bytes)
        boot = str(self.boots)
        self.dispatcher = Dispatcher(
            self.config, run="run", max_policy_lag=self.lag, now=self.now, boot=boot, store=store
        )
        return recover(self.dispatcher.state, store, self.journal.recovered(), self.now)

    def flush(self, *, rotate=False):
        """Flush the journal; with ``rotate``, also begin a new file."""
        self.journal.flush()
        if rotate:
            self.journal.rotate(snapshot(self.dispatcher.state, self.dispatcher.state.store))
            assert self.journal.sync()
            self.journal.retain(self.dispatcher.state.store.files)

    def kill_broker(self):
        """Kill the broker and recover it from its journal. Return the number of records applied."""
        self.flush()
        self.journal.abandon()
        return self._recover()

    # --- sending ------------------------------------------------------------------------------------------

    def say(self, peer, message):
        """Send one message as ``peer``. Return the messages that the broker sends in answer, to any peer."""
        return self.say_frames(peer, encode(message))

    def say_frames(self, peer, frames):
        message, _ = decode(frames)
        return self._note(self.dispatcher.handle(peer, message, frames[1:], self.now))

    def wait(self, seconds, *, beating=(), progress=None, step=0.1):
        """Let time pass; peers in ``beating`` send heartbeats meanwhile."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += step
            for peer in beating:
                grown = 0.0 if progress is None else progress(peer, self.now)
                self.say(peer, Heartbeat(progress=grown, busy=True))
            self._note(self.dispatcher.tick(self.now))

    def _note(self, actions):
        for action in actions:
            self.sent.setdefault(action.peer, []).append(action.message)
            if isinstance(action.message, Deliver):
                self.frames[action.message.unit_id] = list(action.frames)
        return [action.message for action in actions]

    # --- roles --------------------------------------------------------------------------------------------

    def hello(self, role, peer, incarnation=1, **fields):
        return self.say(peer, Hello(role=role, peer=peer, incarnation=incarnation, **fields))

    def learner(self, epoch=1, credit=100, **fields):
        answers = self.hello("learner", "learner", incarnation=epoch, epoch=epoch, **fields)
        if credit:
            self.say("learner", DeliveryCredit(units=credit))
        return answers

    def actor(self, name="actor", tasks=100, incarnation=1):
        answers = self.hello("actor", name, incarnation)
        if tasks:
            self.say(name, TaskCredit(tasks=tasks))
        return answers

    def put(self, *tasks):
        return self.say("learner", PutTasks(tasks=list(tasks)))

    def publish(self, version, epoch=1, line=()):
        weights = PublishWeights(epoch=epoch, version=version, manifest=f"v{version}", line=list(line))
        return self.say("learner", weights)

    def segment(self, peer, lease, index=0, **fields):
        """Send a segment. Return its acknowledgement."""
        answers = self.say_frames(peer, segment_frames(lease, index, **fields))
        return next(message for message in answers if isinstance(message, SegmentAck))

    def commit(self, *units, epoch=1, step=1, dropped=()):
        return self.say("learner", Commit(epoch=epoch, step=step, trained=list(units), dropped=list(dropped)))

    def checkpointed(self, step, epoch=1):
        return self.say("learner", Checkpointed(epoch=epoch, step=step))

    # --- messages sent by the broker ----------------------------------------------------------------------

    def got(self, peer, kind):
        return [message for message in self.sent.get(peer, []) if isinstance(message, kind)]

    def take(self, peer, kind):
        """Return the messages of one kind and remove them, so that each is returned once."""
        got = self.got(peer, kind)
        self.sent[peer] = [message for message in self.sent.get(peer, []) if not isinstance(message, kind)]
        return got

    def leases(self, peer="actor"):
        return self.take(peer, LeaseTask)

    def deliveries(self):
        return self.take("learner", Deliver)

    def dropped(self):
        return self.take("learner", Dropped)

    def credit(self, peer="actor"):
        return sum(message.segments for message in self.take(peer, SegmentCredit))

    @property
    def held(self):
        return len(self.dispatcher.state.store)

    def balanced(self):
        """Assert that the ledger closes: its sums equal what the broker holds. Return True."""
        state = self.dispatcher.state
        segments = [p for t in state.assembly.trajectories.values() for p in t.segments]
        segments += [p for g in state.assembly.groups.values() for t in g.here for p in t.segments]
        segments += [p for u in state.deliveries.units() for p in u.segments]
        assert state.violation() == ""
        assert len(segments) == len(state.store)
        assert sum(p.tokens for p in segments) == state.ledger.held_tokens
        assert sum(p.nbytes for p in segments) == state.store.nbytes
        return True


def close(driver, lease, **fields):
    """Send the last segment of a lease, which has to be stored."""
    assert driver.segment("actor", lease, **fields).status == "stored"


def units(driver):
    """Return the ids of the units that the learner has been given since it was asked last."""
    return [delivery.unit_id for delivery in driver.deliveries()]
