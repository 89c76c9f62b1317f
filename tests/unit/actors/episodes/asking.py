"""An environment that asks as a coroutine tells it to, and a policy whose tokens a test gives out piece by piece."""

import asyncio
import sys
from contextlib import suppress

import numpy as np

from actors.environments import EnvironmentRunner
from actors.episode import Bounds, Episode
from actors.errors import GenerationFailed, TurnRefused
from actors.play_requests import way_of_playing
from actors.sampled import Sampled
from envs.base import OneAtATime, PolicyRequest, RequestNews, StepResult
from protocol.messages.episodes import LeaseTask, Sampling, Task
from tests.unit.actors.test_episode import EOS, Letters

LIMIT_S = 30.0


class Declined(Exception):
    """A request was declined."""


class Asking(OneAtATime):
    """Runs ``work(ask)``; ``await ask(text, after)`` returns the number of the request and its answer."""

    def __init__(self, work):
        super().__init__()
        self._work, self.closed, self.gave_up = work, 0, 0
        self.declined, self.given, self.wanted = [], {}, set()

    async def begin(self, data):
        self._new, self._gone, self._count, self._waiting = [], [], 0, {}
        self._news = asyncio.Event()
        self._running = asyncio.create_task(self._work(self))

    async def __call__(self, text, after=-1, **more):
        number, self._count = self._count, self._count + 1
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._new.append(PolicyRequest(number, [{"role": "user", "content": text}], after, **more))
        self._news.set()
        return number, await self._waiting[number]

    @property
    def open(self):
        """Numbers of the requests that wait for an answer."""
        return [number for number, waiting in self._waiting.items() if not waiting.done()]

    def withdraw(self, number):
        self._gone.append(number)
        self._news.set()

    async def next_requests(self, wait_s):
        news = asyncio.create_task(self._news.wait())
        await asyncio.wait({news, self._running}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        self._news.clear()
        if self._running.done():
            self._running.result()
            return RequestNews(ended=True)
        new, gone, self._new, self._gone = self._new, self._gone, [], []
        return RequestNews(new, gone)

    def answer(self, number, action, facts):
        self.given[number] = (action, facts)
        if not self._waiting[number].done():
            self._waiting[number].set_result(action)
        self._news.set()

    def decline(self, number, why, too_long):
        self.declined.append((number, why, too_long))
        self._waiting[number].set_exception(Declined(why))
        self._news.set()

    async def outcome(self, cut):
        return StepResult(rewards={} if cut else {"score": 1.0}, done=not cut, correct=True)

    def give_up(self):
        self.gave_up += 1

    async def close(self):
        self.closed += 1
        self._running.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._running


class Pieces:
    """A policy that samples what a test gives it. ``ended`` has the turns whose stream was closed before its end."""

    def __init__(self):
        self.requests, self.ended, self._pieces, self._changed = [], [], [], asyncio.Event()

    async def turn(self, request):
        number = len(self.requests)
        self.requests.append(request)
        self._pieces.append(asyncio.Queue())
        self._changed.set()
        left, reason = request.max_tokens, ""
        try:
            while True:
                piece, version = await asyncio.wait_for(self._pieces[number].get(), LIMIT_S)
                if isinstance(piece, Exception):
                    raise piece
                ids = np.array([EOS if c == "$" else ord(c) for c in piece][:left], "i4")
                left -= len(ids)
                reason = "stop" if len(ids) and ids[-1] == EOS else "" if left else "length"
                arrays = ids, np.full(len(ids), -1, "f4"), np.full(len(ids), version, "i4")
                yield Sampled(*arrays, reason, generator=f"generator-{number}")
                if reason:
                    return
        finally:
            if not reason and not isinstance(sys.exc_info()[1], TurnRefused | GenerationFailed):
                self.ended.append(number)
                self._changed.set()

    def give(self, number, *pieces, version=0):
        for piece in pieces:
            self._pieces[number].put_nowait((piece, version))

    def prompt(self, number):
        return "".join(chr(i) if i else "$" for i in self.requests[number].prompt)

    async def until(self, condition):
        """Wait until a condition holds, which may change with a request."""
        while not condition():
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), LIMIT_S)

    async def asked(self, count):
        await self.until(lambda: len(self.requests) >= count)


def play(work, drive, bounds=None, deadline_s=60.0, cancel=False, **sampling):
    """Play an episode beside ``drive(policy, env)``. Return its segments, the episode and the environment.

    Args:
        cancel: cancel the episode once ``drive`` is over.
    """
    cuts, env = [], Asking(work)

    class Suite:
        def episode(self):
            return env

    task = Task(
        task_id="t", env="e", group_id="g", group_size=1, deadline_s=deadline_s,
        sampling=Sampling(**({"max_turn_tokens": 16, "max_trajectory_tokens": 64} | sampling)),
    )  # fmt: skip

    async def emit(new):
        cuts.extend(new)

    async def main():
        runner, policy = EnvironmentRunner(calls=4), Pieces()
        lease = LeaseTask(lease_id="l", attempt=0, task=task)
        episode = Episode(lease, Suite(), Letters(), policy, bounds or Bounds(), emit, runner, way_of_playing)
        running = asyncio.create_task(episode.run())
        try:
            async with asyncio.timeout(LIMIT_S):
                await drive(policy, env)
                if cancel:
                    running.cancel()
                with suppress(asyncio.CancelledError):
                    await running
        finally:
            running.cancel()
            await asyncio.wait({running}, timeout=LIMIT_S)
            runner.close()
        return episode, policy

    episode, policy = asyncio.run(main())
    return cuts, episode, env, policy
