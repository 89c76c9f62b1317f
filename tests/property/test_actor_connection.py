"""An actor's connection may be lost at any moment: every task still ends, before its lease expires.

The broker's state and the actor's leases and outbox are real; episodes and the wire are simulated.
"""

import asyncio
from collections import deque
from types import SimpleNamespace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors import actor as module
from actors.actor import Actor
from actors.config import ActorConfig
from actors.uplink import LeasedEpisodes
from broker.core.tasks import REJECTED_WAIT_S
from protocol.codec import encode
from protocol.messages.peers import Hello, Welcome
from tests.broker_driver import Driver, group, segment_frames
from tests.property.effort import EFFORT

CAPACITY = 3
STEPS = ("put", "up", "up", "up", "down", "down", "down", "emit", "emit", "close", "fail", "lose")


class Wire:
    """A stand-in for the actor's link; ``up`` and ``down`` hold messages until they arrive or are lost."""

    def __init__(self, *_, **__):
        self.up, self.down = deque(), deque()
        self.session = SimpleNamespace(joined=False, welcome=None)

    def send(self, message):
        self.up.append(encode(message))

    def send_frames(self, frames):
        self.up.append(frames)


class World:
    """A broker and an actor. It runs on an event loop, because the actor's episodes are tasks of the loop."""

    def __init__(self):
        self.driver = Driver(heartbeat_s=1000.0, max_attempts=1000, segment_credit=4)
        self.driver.learner()
        self.actor = Actor(
            ActorConfig(concurrent_episodes=CAPACITY), "a", "tcp://b", "e", "run", lambda: None, None
        )
        self.wire = self.actor._link
        # An actor takes tasks only while a generator serves it, so it hears of no change of generators here.
        self.actor._episodes.book.served(by_any=True)
        self.actor._pool.update = lambda infos: None
        self.groups = self.attempts = 0
        self.hello()

    def hello(self):
        self.wire.session.joined = False
        self.wire.send(Hello(role="actor", peer="a", incarnation=1, attempt=self.attempts))
        self.attempts += 1

    def put(self):
        self.groups += 1
        self.driver.put(*group(f"g{self.groups}", 2))

    def up(self):
        if self.wire.up:
            self.driver.say_frames("a", self.wire.up.popleft())

    def down(self):
        self.wire.down += self.driver.take("a", object)
        if not self.wire.down:
            return
        message = self.wire.down.popleft()
        if not isinstance(message, Welcome):
            self.actor._received(message, [])
        elif message.attempt == self.attempts - 1:
            self.wire.session.joined, self.wire.session.welcome = True, message
            self.actor._joined()

    def running(self):
        return next(iter(self.actor._episodes.playing.values()), None)

    def emit(self, status="unfinished"):
        if (episode := self.running()) is None:
            return
        index, lease = episode.sent, episode.lease
        frames = segment_frames(lease, index, offset=4 * index, status=status)
        episode.sent += 1
        self.actor._sender.outbox.offer_frames((lease.trajectory_id, index), frames)
        self.actor._sender.flush()

    def close(self):
        if (episode := self.running()) is not None:
            self.emit("finished")
            episode.done.set_result(None)

    def fail(self):
        if (episode := self.running()) is not None:
            episode.done.set_exception(ValueError("not recordable"))

    def lose(self):
        self.driver.take("a", object)
        self.wire.up.clear()
        self.wire.down.clear()
        self.hello()

    async def settle(self):
        """Let the event loop run what an episode's action has triggered."""
        for _ in range(4):
            await asyncio.sleep(0)

    async def finish(self):
        for round_ in range(400):
            # The broker offers a task again some time after its only actor has rejected it.
            if round_ == 200:
                self.driver.wait(REJECTED_WAIT_S)
            self.up()
            self.down()
            if not self.wire.up:
                self.close()
            await self.settle()
        tasks = self.driver.dispatcher.state.tasks
        assert (tasks.queued, tasks.leased, len(self.actor._episodes.book)) == (0, 0, 0), "stuck"
        assert self.actor._sender.outbox.empty
        assert self.driver.balanced()
        assert self.driver.dispatcher.state.ledger.tasks.get("closed", 0) == 2 * self.groups


async def play(self, lease):
    """Stand in for an episode."""
    episode = SimpleNamespace(lease=lease, sent=0, done=asyncio.get_running_loop().create_future())
    self.playing[lease.lease_id] = episode
    try:
        await episode.done
    except asyncio.CancelledError:
        self._outbox.forget(lease.trajectory_id)
        raise
    finally:
        del self.playing[lease.lease_id]


@settings(max_examples=150 * EFFORT, deadline=None)
# The actor rejects the task, and there is no other actor to run it.
@example(steps=["put", "up", "down", "up", "down", "down", "down", "fail"])
# The message that the task failed is lost, while one of its segments is in transit.
@example(steps=["up", "down", "up", "lose", "put", "down", "emit", "fail", "lose"])
@given(steps=st.lists(st.sampled_from(STEPS), max_size=60))
def test_every_task_comes_to_its_end(steps):
    async def main():
        world = World()
        for step in steps:
            getattr(world, step)()
            await world.settle()
        await world.finish()

    before = module.AsyncLink, LeasedEpisodes._run
    module.AsyncLink, LeasedEpisodes._run = Wire, play
    try:
        LeasedEpisodes.playing = {}  # episodes by lease id
        asyncio.run(main())
    finally:
        module.AsyncLink, LeasedEpisodes._run = before
        del LeasedEpisodes.playing
