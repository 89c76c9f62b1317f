"""Windows of a growing trajectory reach the learner's intake; the broker and the actor are real."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest

from launch.processes import free_ports
from learner.curriculum import Curriculum
from learner.intake.intake import Intake
from learner.settings.learner import LearnerConfig
from protocol.messages.episodes import Deliver, DeliveryCredit, PutTasks
from protocol.messages.peers import Hello
from protocol.sockets import AsyncLink
from tests.integration.actors.actor_harness import (
    ENV_FILE,
    ScriptedGenerator,
    model_folder,
    next_number,
    start_actor,
    until,
)

TURNS = 8
CONFIG = LearnerConfig.model_validate(
    {
        "group_size": 2,
        "batch_trajectories": 2,
        "max_policy_lag": 0,
        "train_on": "windows",
        "sampling": {"max_trajectory_tokens": 128},
    }
)


class Run:
    """A broker process and an actor process; the generator and the learner live in the test."""

    def __init__(self, folder):
        port, http_port = free_ports(2)
        self.endpoint, self.http = f"tcp://127.0.0.1:{port}", f"127.0.0.1:{http_port}"
        self.model, self.tokenizer = model_folder(folder / "model")
        (folder / "counting.py").write_text(ENV_FILE)
        self.env = f"{folder / 'counting.py'}:Counting"
        self.curriculum = Curriculum(self.env, CONFIG)
        self.intake = Intake(self.curriculum, filter_uniform=False, windows=True)
        self.units: list[tuple[str, int]] = []
        """Delivered units, each with the number of turns requested from the generator by then."""
        self.processes, self.links = [], []

    async def start(self):
        self.start_broker()
        self.generator = ScriptedGenerator("generator-0", self.tokenizer, next_number, pause_s=0.02)
        hello = Hello(role="generator", peer="generator-0", incarnation=1, endpoint=self.generator.endpoint)
        self.links.append(AsyncLink(self.endpoint, hello, lambda message, rest: None))
        self.start_actor()
        self.learner = AsyncLink(
            self.endpoint,
            Hello(role="learner", peer="learner", incarnation=1, deliver="segment"),
            self.received,
        )
        self.links.append(self.learner)
        await self.learner.joined(30)
        self.refill()

    def start_broker(self):
        code = (
            "from broker.service import serve\nfrom broker.config import BrokerConfig\n"
            f"serve(BrokerConfig(endpoint={self.endpoint!r}, http={self.http!r}, heartbeat_s=0.2),\n"
            "      run='r', max_policy_lag=4)\n"
        )
        self.processes.append(subprocess.Popen([sys.executable, "-c", code]))

    def start_actor(self):
        self.actor = start_actor(
            self.endpoint, self.model, self.env, {"turns": TURNS}, segment_tokens=4, concurrent_episodes=2
        )
        self.processes.append(self.actor)

    def received(self, message, rest):
        if isinstance(message, Deliver):
            self.units.append((message.unit_id, len(self.generator.requests)))
        self.intake.receive(message, rest)

    def refill(self):
        self.learner.send(PutTasks(tasks=self.curriculum.refill(version=0, lockstep=False)))
        self.learner.send(DeliveryCredit(units=1000))

    def train(self, step=1):
        """Take all ready units and commit them as trained. Return their trajectories."""
        groups = self.intake.take_batch(1000)
        commit = self.intake.commit(0, step, groups)
        if commit is not None:
            self.learner.send(commit)
        return [group.trajectories[0] for group in groups]

    async def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
        for link in self.links:
            await link.close()
        self.generator.close()


@pytest.fixture
def run(tmp_path):
    def play(scenario):
        async def main():
            run = Run(tmp_path)
            try:
                await run.start()
                await scenario(run)
            finally:
                await run.close()

        asyncio.run(main())

    return play


def windows_of(trajectories, trajectory_id):
    return [t for t in trajectories if t.trajectory_id == trajectory_id]


def check_cover(windows):
    """Assert that windows come in order, each extending the last, with every action token exactly once."""
    whole = windows[-1]
    covered = np.zeros(len(whole), dtype=int)
    for before, t in zip([None, *windows], windows, strict=False):
        assert t.window_tokens > 0
        assert t.window_start >= (0 if before is None else len(before))
        assert t.token_ids.tolist() == whole.token_ids[: len(t)].tolist()
        covered[t.window_start : len(t)] += 1
    assert (covered[whole.action_mask] == 1).all()
    assert [t.status for t in windows[:-1]] == ["unfinished"] * (len(windows) - 1)


def test_windows_come_in_order_while_the_trajectory_is_being_generated(run):
    async def scenario(run):
        trained = []
        await until(lambda: run.intake.ready, "the first windows are here")
        assert len(run.generator.requests) < 2 * TURNS, "most turns are still to be sampled"
        trained += run.train()
        # The weights change while the trajectories are being generated.
        run.generator.version = 1
        await until(lambda: len(run.intake.recent) == 2, "both trajectories have ended")
        trained += run.train()
        for member in range(2):
            windows = windows_of(trained, f"0g0.{member}.0")
            check_cover(windows)
            whole = windows[-1]
            assert len(windows) >= TURNS
            assert whole.status == "finished"
            assert whole.return_ == TURNS
            assert sorted(set(whole.policy_version[whole.action_mask].tolist())) == [0, 1]
            text = run.tokenizer.decode(whole.token_ids.tolist(), skip_special_tokens=False)
            turns = "".join(
                f"<assistant>{n}<eos><tool>{n + 1}" if n < 2 * TURNS - 1 else f"<assistant>{n}<eos>"
                for n in range(1, 2 * TURNS, 2)
            )
            assert text == "<bos><user>0" + turns
        early = [unit for unit, requests in run.units if requests < 2 * TURNS]
        assert len(early) > len(run.units) // 2
        assert (len(run.intake.open), run.curriculum.outstanding) == (0, {})
        run.refill()
        await until(lambda: run.intake.ready, "the next tasks take the room that became free")

    run(scenario)


def test_an_actor_that_dies_leaves_no_prefix_behind(run):
    async def scenario(run):
        trained = []
        await until(lambda: len(run.intake.open) == 2, "both trajectories have begun")
        run.actor.kill()
        run.actor.wait()
        run.start_actor()
        await until(lambda: len(run.intake.recent) == 2, "both tasks are done by another attempt")
        trained += run.train()
        assert {t.trajectory_id for t in run.intake.take_recent()} == {"0g0.0.1", "0g0.1.1"}
        assert run.intake.counts.trajectories["broken"] == 2
        for member in range(2):
            check_cover(windows_of(trained, f"0g0.{member}.1"))
        assert (len(run.intake.open), run.intake.open.tokens, run.curriculum.outstanding) == (0, 0, {})

    run(scenario)
