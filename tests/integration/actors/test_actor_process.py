"""Test the actor process with a broker and generators that speak the real protocol over real sockets."""

import asyncio
import contextlib
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from protocol.gauges import ACTOR, ENV
from protocol.messages.episodes import CancelTask, Sampling, SegmentCredit
from protocol.messages.peers import Drain, Refused
from tests.integration.actors.actor_harness import (
    ENV_FILE,
    NotingBroker,
    ScriptedGenerator,
    counting_task,
    model_folder,
    next_number,
    start_actor,
    until,
)


@pytest.fixture
def stage(tmp_path):
    """Return a function that runs ``async scenario(scene)`` with a broker and a model, then cleans up."""

    def play(scenario, **broker):
        async def main():
            scene = Scene(tmp_path, NotingBroker(**broker))
            try:
                await scenario(scene)
            finally:
                await scene.close()

        asyncio.run(main())

    return play


class Scene:
    def __init__(self, folder, broker):
        self.broker = broker
        self.model, self.tokenizer = model_folder(folder / "model")
        (folder / "counting.py").write_text(ENV_FILE)
        self.env = f"{folder / 'counting.py'}:Counting"
        self.actors, self.generators = [], []

    def generator(self, name="generator-0", **more):
        generator = ScriptedGenerator(name, self.tokenizer, more.pop("answer", next_number), **more)
        self.generators.append(generator)
        return generator

    async def actor(self, params=None, env=None, **config):
        actor = start_actor(self.broker.endpoint, self.model, env or self.env, params, **config)
        self.actors.append(actor)
        await until(lambda: self.broker.credits, "the actor announces its credit")
        return actor

    def lease(self, name, attempt=0, **more):
        self.broker.lease(counting_task(name, env=more.pop("env", self.env), **more), attempt)

    async def ended(self, actor):
        await until(lambda: actor.poll() is not None, "the actor ends")
        return actor.returncode

    async def close(self):
        for actor in self.actors:
            actor.kill()
            actor.wait()
        for generator in self.generators:
            generator.close()
        self.broker.close()


def whole(pairs):
    """Return the token ids, mask and versions of a trajectory, joined from its segments."""
    return [
        np.concatenate([arrays[n] for _, arrays in pairs])
        for n in ("token_ids", "action_mask", "policy_version")
    ]


def test_tasks_are_taken_only_while_a_generator_lets_the_actor_in(stage):
    """Otherwise tasks would use up their attempts, each with requests that nobody answers."""

    async def scenario(scene):
        # It takes connections and says nothing.
        with socket.create_server(("127.0.0.1", 0)) as mute:
            await played(scene, mute)

    async def played(scene, mute):
        broker = scene.broker
        closed = SimpleNamespace(name="generator-0", endpoint=f"tcp://127.0.0.1:{mute.getsockname()[1]}")
        broker.list_generators(closed)
        scene.actors.append(start_actor(broker.endpoint, scene.model, scene.env, concurrent_episodes=4))
        await until(lambda: len(broker.beats) > 10, "the actor has joined")
        assert broker.credits == []
        scene.lease("early")
        await until(lambda: broker.rejected, "the lease is rejected")
        assert [(r.lease_id, r.reason) for r in broker.rejected] == [("lease-early-0", "full")]
        open_one = scene.generator("generator-1")
        broker.list_generators(closed, open_one)
        await until(lambda: broker.credits == [4], "the actor announces its credit")
        scene.lease("t", index=3)
        await until(lambda: "t" in broker.closed(), "the episode ends")
        open_one.close()
        # What the broker has of this credit is void, and the actor has none.
        await until(lambda: broker.credits == [4, 1, 0], "the credit is void")

    stage(scenario)


def test_a_group_is_run_and_sigterm_drains(stage):
    async def scenario(scene):
        broker = scene.broker
        broker.list_generators(scene.generator(version=5))
        actor = await scene.actor(concurrent_episodes=4, segment_tokens=8)
        assert broker.credits == [4]
        for member in range(4):
            scene.lease(f"t{member}", attempt=1, index=10 * member)
        await until(lambda: len(broker.closed()) == 4, "four trajectories are closed")
        for member in range(4):
            pairs = broker.of(f"t{member}")
            segments = [s for s, _ in pairs]
            number = 10 * member
            ids, mask, versions = whole(pairs)
            text = scene.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            expected = f"<bos><user>{number}<assistant>{number + 1}<eos><tool>{number + 2}<assistant>"
            assert text == f"{expected}{number + 3}<eos>"
            assert [s.index for s in segments] == list(range(len(segments)))
            assert {s.trajectory_id for s in segments} == {f"t{member}.1"}
            assert all(s.tokens <= 8 for s in segments)
            assert segments[-1].status == "finished"
            assert segments[-1].extra["correct"] is True
            assert [(r.turn, r.value) for s in segments for r in s.rewards] == [(1, 1.0), (3, 1.0)]
            assert set(versions[mask == 1]) == {5}
            assert set(versions[mask == 0]) == {-1}
        await until(lambda: sum(broker.credits) == 8, "credit is given back")
        await until(lambda: broker.gauge("episodes_finished_total") == 4, "the heartbeat tells")
        gauges = broker.beats[-1].gauges
        assert gauges["env/own_gauge"] == 1.0
        # Gauges of teachers are there where there are teachers.
        own = {name for name in ACTOR if not name.startswith("teacher_")}
        assert {name for name in gauges if not name.startswith(ENV)} == own
        assert gauges["tokens_total"] == sum(s.tokens for s, _ in broker.segments)
        # Chunks and looks at environments at work count, too.
        assert broker.beats[-1].progress >= gauges["tokens_total"] + 4
        assert not broker.beats[-1].busy
        actor.terminate()
        assert await scene.ended(actor) == 0
        await until(lambda: broker.goodbyes, "Goodbye arrives")

    stage(scenario)


def test_a_generator_that_stands_still_is_replaced_in_mid_turn(stage):
    async def scenario(scene):
        first = scene.generator("generator-0", version=1)
        second = scene.generator("generator-1", version=2)
        first.stuck_after = 2
        scene.broker.list_generators(first)
        await scene.actor(generator_timeout_s=0.5)
        scene.lease("t0", index=99_998)
        await until(lambda: first.requests, "the first generator is asked")
        scene.broker.list_generators(first, second)
        await until(lambda: scene.broker.closed(), "the trajectory is closed")
        pairs = scene.broker.of("t0")
        ids, mask, versions = whole(pairs)
        text = scene.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        assert text == "<bos><user>99998<assistant>99999<eos><tool>100000<assistant>100001<eos>"
        assert scene.broker.closed()["t0"].status == "finished"
        # The first generator sampled two tokens at version 1; the second sampled all others at version 2.
        assert versions[mask == 1].tolist() == [1, 1] + [2] * 11
        assert second.prompts[0].endswith("<assistant>99")
        await until(lambda: first.aborted, "the stuck request is aborted")
        # The second turn stays with the generator that worked.
        assert len(second.requests) == 2

    stage(scenario)


def test_a_generator_that_dies_is_left_at_once_when_the_broker_says_so(stage):
    async def scenario(scene):
        first = scene.generator("generator-0", version=1)
        first.stuck_after = 1
        scene.broker.list_generators(first)
        await scene.actor(generator_timeout_s=60)
        scene.lease("t0")
        await until(lambda: first.requests, "the first generator is asked")
        first.close()
        scene.broker.list_generators(scene.generator("generator-1", version=2))
        await until(lambda: scene.broker.closed(), "the trajectory is closed", deadline_s=20)
        _, mask, versions = whole(scene.broker.of("t0"))
        # A token of the first generator may have been in transit when the generator died.
        assert versions[mask == 1].tolist() in ([1, 2, 2, 2, 2, 2], [2] * 6)

    stage(scenario)


def test_episodes_share_generators_evenly(stage):
    async def scenario(scene):
        both = [scene.generator(f"generator-{i}", pause_s=0.02) for i in range(2)]
        scene.broker.list_generators(*both)
        await scene.actor(concurrent_episodes=8)
        for member in range(8):
            scene.lease(f"t{member}")
        await until(lambda: len(scene.broker.closed()) == 8, "eight trajectories are closed")
        assert [len(g.requests) for g in both] == [8, 8]

    stage(scenario)


def test_a_broken_task_is_data_and_the_next_one_runs(stage):
    async def scenario(scene):
        scene.broker.list_generators(scene.generator())
        await scene.actor()
        scene.lease("bad", data={"raise": True})
        scene.lease("good")
        await until(lambda: len(scene.broker.closed()) == 2, "both are closed")
        closed = scene.broker.closed()
        assert closed["bad"].status == "failed"
        assert closed["bad"].error.startswith("RuntimeError: this task is broken in ")
        assert closed["bad"].error.endswith("counting.py:9")
        assert closed["good"].status == "finished"
        await until(lambda: scene.broker.gauge("episodes_failed_total") == 1, "it is counted")

    stage(scenario)


def test_a_task_of_another_environment_is_rejected(stage):
    async def scenario(scene):
        scene.broker.list_generators(scene.generator())
        await scene.actor()
        scene.lease("t0", env="chess")
        await until(lambda: scene.broker.rejected, "the task is rejected")
        assert "'chess'" in scene.broker.rejected[0].reason

    stage(scenario)


def test_a_refused_segment_ends_its_episode_and_frees_its_place(stage):
    async def scenario(scene):
        scene.broker.list_generators(scene.generator(pause_s=0.05))
        await scene.actor(params={"turns": 30}, concurrent_episodes=1)
        scene.lease("t0")
        await until(lambda: sum(scene.broker.credits) == 2, "the episode's credit comes back")
        assert scene.broker.closed() == {}
        await until(lambda: scene.broker.gauge("episodes_running") == 0, "the heartbeat tells")

    stage(scenario, ack="refused")


def test_a_cancelled_lease_stops_without_another_segment(stage):
    async def scenario(scene):
        generator = scene.generator(pause_s=0.05)
        scene.broker.list_generators(generator)
        await scene.actor(params={"turns": 30}, concurrent_episodes=1)
        scene.lease("t0")
        await until(lambda: scene.broker.segments, "a segment arrives")
        scene.broker.send(CancelTask(lease_id="lease-t0-0", reason="expired"))
        await until(lambda: sum(scene.broker.credits) == 2, "the credit comes back")
        await until(lambda: generator.aborted, "its request is aborted")
        assert scene.broker.closed() == {}

    stage(scenario)


def test_segments_without_acknowledgement_are_sent_again_after_a_rejoin(stage):
    async def scenario(scene):
        broker = scene.broker
        broker.list_generators(scene.generator())
        await scene.actor()
        scene.lease("t0")
        await until(lambda: broker.closed(), "the trajectory is closed")
        before = [s.index for s, _ in broker.segments]
        broker.ack = "stored"
        # A restarted broker sends this to a peer that it does not know.
        broker.send(Refused(code="unknown_peer", message="say Hello"))
        await until(lambda: len(broker.segments) >= 2 * len(before), "they come again")
        assert [s.index for s, _ in broker.segments] == before * 2
        assert len(broker.hellos) == 2
        # All places of the actor are free.
        assert broker.credits[-1] == 32

    stage(scenario, ack="")


def test_without_segment_credit_episodes_wait_and_nothing_is_lost(stage):
    async def scenario(scene):
        broker = scene.broker
        broker.list_generators(scene.generator())
        await scene.actor(params={"turns": 40}, max_turns=64)
        sampling = Sampling(max_trajectory_tokens=2_000)
        for member in range(4):
            scene.lease(f"t{member}", sampling=sampling)
        await until(lambda: len(broker.segments) == 3, "the credit is used up")
        await until(lambda: (broker.gauge("segments_waiting") or 0) > 64, "they wait")
        assert not broker.beats[-1].busy
        assert len(broker.segments) == 3
        broker.ack = "stored"
        broker.send(SegmentCredit(segments=1_000))
        await until(lambda: len(broker.closed()) == 4, "all are closed")
        for member in range(4):
            assert [s.index for s, _ in broker.of(f"t{member}")] == list(range(40))

    stage(scenario, ack="", credit=3)


def test_what_does_not_end_in_the_drain_time_is_given_up(stage):
    async def scenario(scene):
        broker = scene.broker
        stuck = scene.generator()
        stuck.stuck_after = 1
        broker.list_generators(stuck)
        actor = await scene.actor(drain_timeout_s=0.3)
        scene.lease("t0")
        await until(lambda: stuck.requests, "the episode runs")
        broker.send(Drain(reason="end of the run"))
        await asyncio.sleep(0)
        scene.lease("late")
        assert await scene.ended(actor) == 0
        assert broker.closed() == {}
        assert [r.reason for r in broker.rejected] == ["draining"]
        await until(lambda: broker.goodbyes, "Goodbye arrives")

    stage(scenario)


def test_a_broker_of_another_run_is_refused(stage):
    async def scenario(scene):
        scene.broker.run = "another"
        actor = start_actor(scene.broker.endpoint, scene.model, scene.env)
        scene.actors.append(actor)
        assert await scene.ended(actor) == 1

    stage(scenario)


def test_sigterm_before_a_broker_answers_ends_with_0(stage):
    async def scenario(scene):
        actor = start_actor("tcp://127.0.0.1:9", scene.model, scene.env)
        scene.actors.append(actor)

        def handles_sigterm():
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{actor.pid}/status").read_text().splitlines()
                caught = next(line for line in lines if line.startswith("SigCgt"))
                return int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1
            return False

        await until(handles_sigterm, "the actor handles SIGTERM")
        actor.terminate()
        assert await scene.ended(actor) == 0

    stage(scenario)


@pytest.mark.parametrize("moment", ["zmq.Context._add_socket", "asyncio.Handle._run"])
def test_sigterm_in_a_moment_in_which_nothing_may_end_ends_with_0_too(stage, moment):
    """Before a socket is on ZeroMQ's list, and before the loop makes the first step of a task."""
    before = f"""
import asyncio, os, signal, zmq
do = {moment}
def signalled(*arguments):
    {moment} = do
    os.kill(os.getpid(), signal.SIGTERM)
    return do(*arguments)
{moment} = signalled"""

    async def scenario(scene):
        actor = start_actor("tcp://127.0.0.1:9", scene.model, scene.env, before=before)
        scene.actors.append(actor)
        assert await scene.ended(actor) == 0

    stage(scenario)


def test_calculator_with_a_real_scorer_that_dies_with_its_actor(stage):
    def solve(text):
        """Return the calculator's next action, read from the conversation as the template writes it."""
        question, *turns = text.split("<assistant>")
        terms = question.partition("problem: ")[2].rstrip(" =").split()
        total, done = int(terms[0]), len(turns)
        for sign, term in zip(terms[1::2], terms[2::2], strict=True):
            if done == 0:
                return f"{total}{sign}{term}"
            total, done = total + (1 if sign == "+" else -1) * int(term), done - 1
        return f"={total}"

    async def scenario(scene):
        broker = scene.broker
        broker.list_generators(scene.generator(answer=solve))
        actor = await scene.actor(env="calculator", params={"sandbox": "process"})
        sampling = Sampling(max_trajectory_tokens=200)
        for member in range(4):
            scene.lease(f"t{member}", env="calculator", index=member, sampling=sampling)
        await until(lambda: len(broker.closed()) == 4, "four sums are solved")
        for segment in broker.closed().values():
            assert segment.extra["correct"] is True
            assert sum(r.value for s, _ in broker.of(segment.task_id) for r in s.rewards) == pytest.approx(
                1.4
            )
        await until(
            lambda: broker.gauge("env/scorer_timeouts_total") == 0, "the heartbeat has the scorer's counters"
        )
        workers = children(actor.pid)
        assert len(workers) == 1
        actor.kill()
        await scene.ended(actor)
        await until(lambda: gone(workers[0]), "no orphan")

    stage(scenario)


def children(pid):
    """Return the ids of the processes that any thread of a process has started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for one in lists for child in one.read_text().split()]


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
