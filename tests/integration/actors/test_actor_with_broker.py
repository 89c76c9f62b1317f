"""Test the actor with the real broker: a group arrives whole even if the broker is killed midway."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest
from aiohttp import web

from actors.config import Teacher
from launch.processes import free_ports
from learner.intake.trajectories import assemble
from protocol.codec import decode_delivery
from protocol.messages.episodes import Commit, Deliver, DeliveryCredit, PutTasks, Sampling
from protocol.messages.peers import Hello
from protocol.sockets import AsyncLink
from tests.integration.actors.actor_harness import (
    ENV_FILE,
    ScriptedGenerator,
    counting_task,
    model_folder,
    next_number,
    start_actor,
    until,
)
from tests.integration.envs.test_judge import Server


class Run:
    """A broker process and an actor process; the learner and the generators live in the test."""

    def __init__(self, folder):
        port, http_port = free_ports(2)
        self.endpoint, self.http = f"tcp://127.0.0.1:{port}", f"127.0.0.1:{http_port}"
        self.model, self.tokenizer = model_folder(folder / "model")
        (folder / "counting.py").write_text(ENV_FILE)
        self.env = f"{folder / 'counting.py'}:Counting"
        self.delivered: list = []
        self.processes, self.links, self.generators = [], [], []
        self.learner = None

    def start_broker(self):
        code = (
            "from broker.service import serve\nfrom broker.config import BrokerConfig\n"
            f"serve(BrokerConfig(endpoint={self.endpoint!r}, http={self.http!r}, heartbeat_s=0.2),\n"
            "      run='r', max_policy_lag=4)\n"
        )
        self.broker = subprocess.Popen([sys.executable, "-c", code])
        self.processes.append(self.broker)

    def start_actor(self, **config):
        self.actor = start_actor(self.endpoint, self.model, self.env, **config)
        self.processes.append(self.actor)

    async def generator(self, name, **more):
        generator = ScriptedGenerator(name, self.tokenizer, next_number, **more)
        hello = Hello(role="generator", peer=name, incarnation=1, endpoint=generator.endpoint)
        self.generators.append(generator)
        self.links.append(AsyncLink(self.endpoint, hello, lambda message, rest: None))
        return generator

    async def learn(self):
        def received(message, rest):
            if isinstance(message, Deliver):
                self.delivered.append((message, decode_delivery(message, rest)))
                self.learner.send(Commit(epoch=0, step=len(self.delivered), trained=[message.unit_id]))

        hello = Hello(role="learner", peer="learner", incarnation=1, epoch=0, deliver="group")
        # Each join voids the credit granted before; after a restart of the broker there may be two joins.
        self.learner = AsyncLink(
            self.endpoint, hello, received, on_join=lambda: self.learner.send(DeliveryCredit(units=4))
        )
        self.links.append(self.learner)
        await self.learner.joined(30)

    def put(self, *names, **more):
        group = {"group_id": "g0", "group_size": len(names), "env": self.env} | more
        tasks = [counting_task(name, member=i, **group) for i, name in enumerate(names)]
        self.learner.send(PutTasks(tasks=tasks))

    async def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
        for link in self.links:
            await link.close()
        for generator in self.generators:
            generator.close()


@pytest.fixture
def run(tmp_path):
    def play(scenario):
        async def main():
            run = Run(tmp_path)
            run.start_broker()
            try:
                await scenario(run)
            finally:
                await run.close()

        asyncio.run(main())

    return play


def check_group(run, size):
    """Assert that the last delivered unit holds ``size`` trajectories, each from prompt to end."""
    deliver, segments = run.delivered[-1]
    assert deliver.complete
    by_trajectory = {}
    for segment, arrays in segments:
        by_trajectory.setdefault(segment.trajectory_id, []).append((segment, arrays))
    assert len(by_trajectory) == size
    for pairs in by_trajectory.values():
        assert [s.index for s, _ in pairs] == list(range(len(pairs)))
        assert pairs[-1][0].status == "finished"
        ids = np.concatenate([a["token_ids"] for _, a in pairs]).tolist()
        text = run.tokenizer.decode(ids, skip_special_tokens=False)
        assert text == "<bos><user>10<assistant>11<eos><tool>12<assistant>13<eos>"


def test_a_group_of_four_arrives_whole_and_the_actor_drains(run):
    async def scenario(run):
        await run.generator("generator-0")
        await run.learn()
        run.start_actor(concurrent_episodes=2, segment_tokens=4)
        run.put("a", "b", "c", "d")
        await until(lambda: run.delivered, "the group is delivered")
        check_group(run, 4)
        run.actor.terminate()
        await until(lambda: run.actor.poll() is not None, "the actor ends")
        assert run.actor.returncode == 0

    run(scenario)


def test_a_generator_killed_in_mid_turn_costs_no_trajectory(run):
    async def scenario(run):
        first = await run.generator("generator-0", version=1)
        first.stuck_after = 1
        await run.learn()
        run.start_actor(generator_timeout_s=60)
        run.put("a", "b", sampling=Sampling(max_trajectory_tokens=128))
        await until(lambda: first.tokens == 2, "both turns have a token")
        # The generator says Goodbye, and its socket closes.
        await run.links[0].close()
        first.close()
        await run.generator("generator-1", version=2)
        await until(lambda: run.delivered, "the group is delivered")
        check_group(run, 2)
        versions = {
            tuple(a["policy_version"][a["action_mask"] == 1][:2])
            for s, a in run.delivered[-1][1]
            if s.index == 0
        }
        assert versions == {(1, 2)}

    run(scenario)


def test_a_broker_killed_in_the_middle_is_joined_again_and_serves_on(run):
    async def scenario(run):
        slow = await run.generator("generator-0", pause_s=0.02)
        await run.learn()
        run.start_actor(concurrent_episodes=4)
        run.put("a", "b", "c", "d")
        await until(lambda: len(slow.requests) >= 4, "episodes run")
        run.broker.kill()
        run.broker.wait()
        run.start_broker()
        joins = run.learner.session.joins
        await until(lambda: run.learner.session.joins > joins, "the learner has joined again")
        # The broker lost its memory: the learner puts its tasks again, and old attempts are refused.
        run.put("a", "b", "c", "d")
        await until(lambda: run.delivered, "the group is delivered")
        check_group(run, 4)
        assert run.actor.poll() is None
        run.put("e", "f", group_id="g1")
        await until(lambda: len(run.delivered) == 2, "the next group too")
        check_group(run, 2)

    run(scenario)


class Counter(Server):
    """A teacher that answers with the next number, or with a status."""

    async def answer(self, request):
        body = await request.json()
        self.keys.append(sorted(body))
        self.asked.append([(message["role"], message["content"]) for message in body["messages"]])
        if self.script:
            return web.Response(status=self.script.pop(0), text="no")
        said = str(int(body["messages"][-1]["content"]) + 1)
        return web.json_response({"choices": [{"message": {"content": said}}]})


def test_a_teacher_plays_the_tasks_that_name_it_and_its_tokens_reach_the_learner(run):
    async def scenario(run):
        async with Counter(401) as teacher:
            config = {"name": "big", "url": teacher.url, "model": "m", "rest_s": 0.0}
            run.start_actor(concurrent_episodes=1, teachers=[Teacher(**config).model_dump()])
            await run.generator("generator-0")
            await run.learn()
            run.put("a", "b", policy="big")
            await until(lambda: run.delivered, "the group is delivered")
        _, segments = run.delivered[-1]
        failed = [segment for segment, _ in segments if segment.status == "failed"]
        played = [(segment, arrays) for segment, arrays in segments if segment.task_id != failed[0].task_id]
        assert len(failed) == 1
        assert "teacher big: HTTP status 401" in failed[0].error
        t = assemble([(segment, arrays) for segment, arrays in played])
        assert (t.origin, t.status) == ("taught", "finished")
        assert set(t.policy_version.tolist()) == {-1}
        assert run.tokenizer.decode(t.token_ids[t.action_mask].tolist(), skip_special_tokens=True) == "1113"
        # A bound that is not set is not sent: a server may refuse one above its context.
        assert teacher.keys[0] == ["messages", "model", "temperature"]
        opening = ("user", "10")
        assert teacher.asked[1:] == [[opening], [opening, ("assistant", "11"), ("user", "12")]], "it grows"
        assert not run.generators[0].tokens, "no generator was asked"

    run(scenario)
