"""Learner and broker may be killed at any moment: the surviving line of checkpoints trains each unit once.

The broker's state and journal and the learner's exchange, intake and curriculum are real. Processes, sockets
and the gradient are simulated.
"""

import shutil
import tempfile
from collections import deque
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launch.commands import retrain
from learner.curriculum import Curriculum
from learner.intake.session import BrokerSession
from learner.intake.waiting_families import WaitingFamilies
from learner.settings.learner import LearnerConfig
from protocol.messages.episodes import Dropped
from protocol.messages.peers import Refused
from tests.broker_driver import Driver
from tests.property.effort import EFFORT
from tests.unit.learner.test_supply import DELIVER, EPISODES, Supply


class World(Supply):
    """One run. The learner's memory dies with the learner; its checkpoint does not."""

    decode = staticmethod(str)
    """Turns tokens into text, for families that quote answers."""

    def __init__(self, train_on, folder, seed, lag, *, family=None, trouble=False, size=2, **settings):
        super().__init__(train_on, lag=lag, seed=seed, trouble=trouble)
        self.config = LearnerConfig(
            group_size=size, batch_trajectories=2 * size, max_policy_lag=lag, train_on=train_on, steps=99,
            checkpoint_every=9, start_timeout_s=60.0, data_timeout_s=60.0, family=family, **settings,
        )  # fmt: skip
        self.driver = Driver(lag=lag, folder=folder, heartbeat_s=1000.0)
        self.epoch, self.deaf = 0, False
        self.saved = None
        self.live()
        self.driver.actor(tasks=EPISODES)

    # --- the learner --------------------------------------------------------------------------------------

    def live(self):
        """Start the next learner process."""
        self.epoch += 1
        self.driver.take("learner", object)
        self.queued, self.joins = deque([None]), 1
        self.step, self.trained, self.lines, held = 0, {}, {}, 0
        if self.saved is not None:
            self.step, self.trained = self.saved["step"], dict(self.saved["trained"])
            self.lines, held = dict(self.saved["lines"]), self.saved["version"]
        self.hello()
        curriculum = Curriculum("e", self.config, self.epoch, lineage=1)
        self.exchange = BrokerSession(
            self, curriculum, self.config, lockstep=False, stop_reason=lambda: "", step=self.step
        )
        if self.config.family is not None:
            self.exchange.intake.families = WaitingFamilies(self.config.family, curriculum, self.decode)
        if self.saved is not None:
            curriculum.restore(self.saved["curriculum"])
            self.exchange.intake.restore(self.saved["inlet"])
            self.exchange.intake.open.restore(self.saved["open"])
        if self.epoch > 1:
            if self.version > held:
                self.exchange.intake.line.fork(held, self.version + 1)
                self.version += 1
            self.publish(self.version)
            self.exchange.inherit()

    def hello(self):
        self.driver.learner(
            epoch=self.epoch, credit=0, lineage=1, deliver=DELIVER[self.config.train_on], step=self.saved_step
        )

    @property
    def saved_step(self):
        return self.saved["step"] if self.saved else 0

    def send(self, message, join=None):
        if not self.deaf:
            super().send(message, join)

    def publish(self, version):
        self.version = version
        self.driver.publish(version, epoch=self.epoch, line=self.exchange.intake.line.forks)

    def hear(self):
        before = len(self.queued)
        super().hear()
        for message, _ in list(self.queued)[before:]:
            # A checkpoint may overtake the repetition of a commit that was lost.
            assert not isinstance(message, Refused) or message.code == "not_committed", message
            if isinstance(message, Dropped):
                assert all(message.unit_id not in units for units in self.trained.values()), message

    def actor_joins(self):
        """Let the actor join again; the broker sends the leases that it is running again."""
        self.take_leases()
        self.driver.actor(tasks=max(0, EPISODES - len(self.running)))

    def train(self, *, lost=False, slowly=False):
        groups = self.exchange.collect(step=self.step, version=self.version)
        for _ in range(2 * EPISODES * slowly):
            self.go_on()
        self.step += 1
        units = [part.unit_id for group in groups for part in group.parts if part.trained]
        assert len(units) == len(set(units))
        before = {unit for batch in self.trained.values() for unit in batch}
        assert not before & set(units), "trained twice"
        self.trained[self.step] = units
        updated = self.version
        self.lines[self.step] = updated, self.exchange.intake.line.forks
        self.publish(updated + 1)
        self.deaf = lost
        self.exchange.commit(groups, step=self.step, version=updated)
        self.exchange.intake.check()

    def train_slowly(self):
        """Train so slowly that the next batch is sampled meanwhile, and is stale afterwards."""
        self.train(slowly=True)

    def checkpoint(self):
        exchange = self.exchange
        exchange.flush(step=self.step)
        self.saved = {
            "step": self.step,
            "trained": dict(self.trained),
            "lines": dict(self.lines),
            "version": self.version,
            "curriculum": exchange.curriculum.state(),
            "inlet": exchange.intake.state(),
            "open": exchange.intake.open.encode(),
        }
        exchange.checkpointed(step=self.step)

    # --- failures -----------------------------------------------------------------------------------------

    def kill_learner(self):
        self.live()

    def kill_broker(self):
        """Kill the broker, which may not have the last step's commit; peers join again by themselves."""
        self.driver.kill_broker()
        self.deaf = False
        self.actor_joins()
        self.rejoin()

    def lose_commit(self):
        """Lose the last commit, and kill the broker."""
        self.train(lost=True)
        self.kill_broker()

    def lose_connection(self):
        """Lose the connection with the last commit and all messages in transit; both processes live."""
        self.train(lost=True)
        self.deaf = False
        self.rejoin()

    def settle(self):
        """Lose the connection with the last commits, at the end of the run."""
        self.train(lost=True)
        self.deaf = False
        self.exchange.confirm_commits(step=self.step)

    def lose_connection_late(self):
        """Lose the connection, but keep the broker's messages: the learner reads them after it rejoins."""
        self.train(lost=True, slowly=True)
        self.deaf = False
        self.hear()
        self.rejoin()

    def rejoin(self):
        self.driver.take("learner", object)
        self.queued.append(None)
        self.joins += 1
        self.hello()

    def kill_both(self):
        self.train(lost=True)
        self.deaf = False
        self.driver.kill_broker()
        self.actor_joins()
        self.live()

    def save_and_kill_both(self):
        """Kill both after a step and its checkpoint, of which the broker never hears."""
        self.train(lost=True)
        self.checkpoint()
        self.deaf = False
        self.driver.kill_broker()
        self.actor_joins()
        self.live()


DEATHS = [
    "kill_learner",
    "kill_broker",
    "lose_commit",
    "lose_connection",
    "lose_connection_late",
    "kill_both",
    "save_and_kill_both",
]
ACTIONS = ["train", "train", "train_slowly", "train_slowly", "checkpoint", *DEATHS]


@pytest.mark.parametrize("train_on", ["groups", "trajectories", "windows"])
@settings(max_examples=100 * EFFORT, deadline=None)
@given(
    actions=st.lists(st.sampled_from(ACTIONS), max_size=14),
    seed=st.integers(0, 99),
    lag=st.integers(0, 2),
)
# The last window of a trajectory is dropped, an earlier one is trained, and its commit is lost.
@example(
    actions=[
        "train",
        "kill_both",
        "kill_learner",
        "kill_learner",
        "train",
        "save_and_kill_both",
        "kill_learner",
    ],
    seed=48,
    lag=2,
)
def test_each_unit_is_trained_once_in_the_line_that_survives(train_on, actions, seed, lag):
    folder = Path(tempfile.mkdtemp())
    try:
        world = World(train_on, folder, seed, lag)
        for action in [*actions, "train", "kill_broker", "train", "checkpoint"]:
            getattr(world, action)()
            assert world.driver.balanced()
        world.settle()
        world.driver.flush()
        recorded = retrain.read_recording(folder)
        told = {step: sorted(batch.trained) for step, batch in recorded.batches.items() if batch.trained}
        assert told == {step: sorted(units) for step, units in world.trained.items()}
        for step in recorded.steps(recorded.last):
            assert sorted(step.trained) == sorted(world.trained[step.step])
            assert (step.version, step.forks) == world.lines[step.step]
        world.driver.journal.close()
    finally:
        shutil.rmtree(folder)
