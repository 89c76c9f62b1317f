"""Test how an actor answers leases; the link is a list of the messages sent."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from actors import actor as module
from actors import uplink
from actors.actor import Actor
from actors.config import ActorConfig
from actors.generator_client import TurnRequest
from actors.uplink import LeasedEpisodes
from protocol.messages.episodes import (
    CancelTask,
    LeaseTask,
    SegmentAck,
    SegmentCredit,
    Task,
    TaskCredit,
    TaskRejected,
)


class Link:
    def __init__(self, *_, **__):
        self.sent, self.segments = [], []
        self.session = SimpleNamespace(joined=True)

    def send(self, message):
        self.sent.append(message)

    def send_frames(self, frames):
        self.segments.append(frames)


class Suite:
    def episode(self):
        raise AssertionError("no test here comes so far")


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(module, "AsyncLink", Link)

    async def run(self, lease):
        await asyncio.Event().wait()

    monkeypatch.setattr(LeasedEpisodes, "_run", run)

    def make():
        actor = Actor(ActorConfig(concurrent_episodes=2), "a", "tcp://b", "e", "r", Suite, None)
        actor._episodes.book.served(by_any=True)
        return actor

    return make


def lease(lease_id, name="t", env="e", attempt=0):
    task = Task(task_id=name, env=env, group_id="g", group_size=1)
    return LeaseTask(lease_id=lease_id, attempt=attempt, task=task)


def test_a_task_of_another_environment_gives_its_credit_back_unless_draining(make):
    async def main():
        actor = make()
        actor._received(lease("l1", env="other"), [])
        rejected, credit = actor._link.sent
        assert (rejected.lease_id, credit) == ("l1", TaskCredit(tasks=1))
        actor.stop()
        actor._received(lease("l2", env="other"), [])
        assert [type(message) for message in actor._link.sent[2:]] == [TaskRejected]

    asyncio.run(main())


def test_a_lease_that_is_told_again_is_not_run_again(make):
    async def main():
        actor = make()
        actor._received(lease("l1"), [])
        assert actor._link.sent == []
        actor._received(lease("l1"), [])
        assert actor._link.sent == []
        assert len(actor._episodes._running) == 1

    asyncio.run(main())


def test_a_lease_that_has_come_to_nothing_here_is_given_back_when_it_is_told_again(make):
    async def main():
        actor = make()
        actor._received(lease("l1"), [])
        await asyncio.sleep(0)
        actor._episodes.cancel("l1", "as if it could not be recorded")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert actor._link.sent == [TaskCredit(tasks=1)]
        actor._sender.outbox.offer_frames(("t.0", 0), [b"its end, which is on its way"])
        actor._received(lease("l1"), [])
        assert len(actor._link.sent) == 1
        actor._sender.outbox.acked(SegmentAck(trajectory_id="t.0", index=0, status="stored"))
        actor._received(lease("l1"), [])
        assert actor._link.sent[1:] == [TaskRejected(lease_id="l1", reason="it has ended here", fault=False)]

    asyncio.run(main())


def test_leases_beyond_the_capacity_are_rejected_without_more_credit(make):
    async def main():
        actor = make()
        for number in range(3):
            actor._received(lease(f"l{number}", name=f"t{number}"), [])
        assert actor._link.sent == [TaskRejected(lease_id="l2", reason="full")]
        assert len(actor._episodes._running) == 2

    asyncio.run(main())


def test_an_attempt_leased_again_by_another_broker_is_neither_run_twice_nor_spliced(make):
    async def main():
        actor = make()
        actor._received(lease("old"), [])
        await asyncio.sleep(0)
        actor._sender.outbox.offer_frames(("t.0", 0), [b"of the old episode"])
        actor._received(lease("new"), [])
        assert [type(message) for message in actor._link.sent] == [TaskRejected, TaskCredit]
        assert actor._link.sent[0].lease_id == "new"
        actor._received(SegmentCredit(segments=9), [])
        assert actor._link.segments == []
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert actor._episodes._running == {}
        actor._received(lease("next", attempt=1), [])
        assert list(actor._episodes._running) == ["next"]

    asyncio.run(main())


def test_an_attempt_that_has_ended_here_but_is_not_acknowledged_is_not_run_under_another_lease(make):
    async def main():
        actor = make()
        actor._sender.outbox.offer_frames(("t.0", 1), [b"closing segment, for the broker before this one"])
        actor._received(lease("new"), [])
        assert [type(message) for message in actor._link.sent] == [TaskRejected, TaskCredit]
        assert actor._episodes._running == {}
        assert actor._sender.outbox.empty

    asyncio.run(main())


def test_segments_are_offered_together_before_waiting_for_room(make, monkeypatch):
    monkeypatch.setattr(uplink, "WAITING_SEGMENTS", 0)

    async def main():
        actor = make()
        cuts = [SimpleNamespace(segment=SimpleNamespace(tokens=1)) for _ in range(3)]
        offered = []
        monkeypatch.setattr(actor._sender.outbox, "offer", offered.append)
        actor._sender.outbox.offer_frames(("t.0", 0), [b"waiting"])
        emitting = asyncio.create_task(actor._sender.emit(cuts))
        await asyncio.sleep(0)
        assert offered == cuts
        assert not emitting.done()
        emitting.cancel()

    asyncio.run(main())


class Made(Suite):
    made = 0

    def __init__(self):
        type(self).made += 1
        if self.made > 1:
            time.sleep(0.2)


def test_a_suite_whose_event_loop_was_left_behind_is_made_anew_once_even_if_an_episode_is_cancelled(
    monkeypatch,
):
    monkeypatch.setattr(module, "AsyncLink", Link)
    monkeypatch.setattr(Made, "made", 0)
    began, over = [], asyncio.Event()

    async def run(self):
        began.append((self.trajectory_id, self._suite))
        if len(began) == 2:
            over.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(module.Episode, "run", run)

    async def main():
        actor = Actor(ActorConfig(concurrent_episodes=3), "a", "tcp://b", "e", "r", Made, None)
        old, closed = actor._suite._suite, asyncio.Event()
        loop = asyncio.get_running_loop()

        async def close():
            loop.call_soon_threadsafe(closed.set)

        old.close = close
        actor._episodes.book.served(by_any=True)
        actor._received(lease("l0", name="t0"), [])
        await asyncio.sleep(0)
        actor._suite.environments.loops_left += 1
        actor._received(lease("l1", name="t1"), [])
        actor._received(lease("l2", name="t2"), [])
        await asyncio.sleep(0.05)
        actor._received(CancelTask(lease_id="l1", reason="not wanted"), [])
        await over.wait()
        assert began == [("t0.0", old), ("t2.0", actor._suite._suite)]
        assert Made.made == 2
        await closed.wait()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_turn_that_waits_for_a_generator_keeps_its_lease(make):
    async def main():
        actor = make()
        request = TurnRequest("t.0", turn=0, prompt=(1,), max_tokens=1)
        turn = asyncio.create_task(anext(actor._pool.turn(request)))
        before = actor._progress().progress
        actor._look_at_work()
        assert actor._progress().progress == before
        await asyncio.sleep(0.01)
        actor._look_at_work()
        assert actor._progress().progress > before
        turn.cancel()
        await asyncio.wait({turn})
        assert actor._pool.waiting == 0

    asyncio.run(main())
