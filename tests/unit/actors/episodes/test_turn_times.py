"""Test what turns say of their time: waited, sampled and in tools, by the actor's monotonic clock."""

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from actors import episode as episode_module
from actors import play_requests
from actors.sampled import Sampled
from actors.segments import Closing, SegmentCutter
from protocol.codec import decode, encode_arrays
from protocol.messages.episodes import Segment, Task, TurnTime
from tests.unit.actors.episodes import asking
from tests.unit.actors.test_episode import DONE, Env, Script, play, say


@pytest.fixture
def clock(monkeypatch):
    """Stop the monotonic clock of episodes. The test moves it."""
    now = SimpleNamespace(at=100.0)
    stopped = SimpleNamespace(monotonic=lambda: now.at)
    monkeypatch.setattr(episode_module, "time", stopped)
    monkeypatch.setattr(play_requests, "time", stopped)
    return now


class SlowScript(Script):
    """Takes 2 s until the first piece of an answer, and 0.5 s for each further one."""

    def __init__(self, clock, *turns):
        super().__init__(*turns)
        self._clock = clock

    async def turn(self, request):
        self._clock.at += 2.0
        async for sampled in super().turn(request):
            yield sampled
            self._clock.at += 0.5


class SlowEnv(Env):
    """Takes 7 s for its reset, and 3 s for each step."""

    def __init__(self, clock, *steps):
        super().__init__(*steps)
        self._clock = clock

    async def reset(self, data):
        self._clock.at += 7.0
        return await super().reset(data)

    async def step(self, action):
        self._clock.at += 3.0
        return await super().step(action)


def times(cuts):
    return [spent for cut in cuts for spent in cut.segment.times]


def test_each_turn_says_where_its_time_went(clock):
    env, script = SlowEnv(clock, say("more"), DONE), SlowScript(clock, ["ab", "c", "d$"], ["e", "f$"])
    cuts, episode = play(env, script)
    assert episode.status == "finished"
    assert times(cuts) == [
        TurnTime(0, 0.0, 0.0, 7.0),
        TurnTime(1, 2.0, 1.0, 3.0),
        TurnTime(3, 2.0, 0.5, 3.0),
    ]
    assert [len(cut.segment.times) for cut in cuts] == [2, 1]


def test_an_episode_that_fails_says_what_it_took(clock):
    env, script = SlowEnv(clock, ValueError("no")), SlowScript(clock, ["a", "b$"])
    cuts, episode = play(env, script)
    assert episode.status == "failed"
    assert times(cuts) == [TurnTime(0, 0.0, 0.0, 7.0), TurnTime(1, 2.0, 0.5, 0.0)]


def test_an_agents_time_behind_an_answer_is_its_turns(clock):
    async def work(ask):
        clock.at += 4.0
        number, _ = await ask("A:")
        clock.at += 5.0
        await ask("more", number)
        clock.at += 1.5

    async def drive(policy, env):
        for number, text in enumerate(("a", "b")):
            await policy.asked(number + 1)
            clock.at += 2.0
            policy.give(number, text)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            clock.at += 0.5
            policy.give(number, "$")

    cuts, episode, _, _ = asking.play(work, drive)
    assert episode.status == "finished"
    spent = {turn: [0.0, 0.0, 0.0] for turn in (0, 1, 3)}
    for one in times(cuts):
        spent[one.turn] = [
            a + b for a, b in zip(spent[one.turn], msgspec.structs.astuple(one)[1:], strict=True)
        ]
    assert spent[0] == [0.0, 0.0, 4.0]
    assert (spent[1][2], spent[3][2]) == (5.0, 1.5)
    assert [sum(spent[turn][:2]) for turn in (1, 3)] == [2.5, 2.5]


def test_the_time_of_a_turn_in_several_requests_adds_up():
    cutter = SegmentCutter(Task(task_id="t", env="e", group_id="g", group_size=1), "t.0", 64)
    cutter.observe([1])
    cutter.act(_tokens(2))
    cutter.note_time(1, waited=1.0, sampled=0.25)
    cutter.note_time(1, waited=2.0, tools=-5.0)
    cutter.note_time(3)
    (cut,) = cutter.close_turn({}, closing=Closing("finished"))
    assert cut.segment.times == [TurnTime(1, 3.0, 0.25, 0.0)]


def test_a_segment_of_an_older_actor_is_taken_and_an_older_receiver_ignores_times():
    cutter = SegmentCutter(Task(task_id="t", env="e", group_id="g", group_size=1), "t.0", 64)
    cutter.observe([1])
    cutter.act(_tokens(2))
    cutter.note_time(1, waited=1.0)
    (cut,) = cutter.close_turn({}, closing=Closing("finished"))
    frames = encode_arrays(cut.segment, cut.arrays)
    fields = msgspec.msgpack.decode(frames[1])
    assert fields.pop("times") == [[1, 1.0, 0.0, 0.0]]
    older, _ = decode([b"OB\x04\x04", msgspec.msgpack.encode(fields), frames[2]])
    assert isinstance(older, Segment)
    assert older.times == []
    newer = fields | {"times": [[1, 1.0, 0.0, 0.0, "of a later version"]]}
    assert decode([b"OB\x04\x09", msgspec.msgpack.encode(newer), frames[2]])[0].times == cut.segment.times


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, float("inf")])
def test_a_time_that_is_none_is_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([1, 0.0, wrong, 0.0], TurnTime)


def _tokens(n):
    return Sampled(np.full(n, 5, "i4"), np.zeros(n, "f4"), np.zeros(n, "i4"))
