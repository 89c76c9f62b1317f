"""One episode of one turn against a generator under test, with a stop string from the middle of its answer."""

import asyncio

import pytest

from actors.environments import EnvironmentRunner
from actors.episode import Bounds, Episode
from actors.generator_client import GeneratorPool
from actors.play_requests import way_of_playing
from envs.base import StepResult
from protocol.messages.episodes import LeaseTask, Sampling, Task
from protocol.messages.peers import GeneratorInfo
from tests.integration.actors.generator_harness import Running
from tests.integration.learner.tiny_qwen3 import VOCAB

PROMPT = [3, 4, 5, 6, 7]
NEVER = VOCAB
"""A stop token that cannot occur."""


class Numbers:
    """A renderer whose tokens are numbers in words, each with a full stop behind it."""

    eos_ids = (NEVER,)

    def prompt(self, messages, tools=()):
        return PROMPT

    def observation(self, messages, sampled, tools=()):
        raise AssertionError("the only turn is the last one")

    def with_known_calls(self, answer):
        return answer

    def decode(self, ids, keep_special=False):
        return "".join(f"{i}." for i in ids)

    def check_prefix(self, known, prompt):
        assert list(prompt[: len(known)]) == list(known)


class OneTurn:
    """A suite and its only environment, which keeps the action."""

    action = ""

    def episode(self):
        return self

    async def reset(self, data):
        return [{"role": "user", "content": "count"}]

    async def step(self, action):
        self.action = action
        return StepResult(rewards={}, done=True)

    async def close(self):
        pass


def check_stop_string(running: Running) -> None:
    """Ask for a greedy answer, then for one that ends at a string in its middle, and compare them."""
    asker = running.actor("whole")
    settings = {"max_tokens": 64, "temperature": 0.0, "stop_token_ids": [NEVER]}
    whole = running.ask(asker, "whole", PROMPT, **settings)
    text = Numbers().decode(whole.ids)
    stop = f".{whole.ids[20]}.{whole.ids[21]}."
    end = next(n for n in range(1, 65) if stop in Numbers().decode(whole.ids[:n]))
    assert running.broker.hello is not None
    info = GeneratorInfo(peer="generator-0", endpoint=running.broker.hello.endpoint)
    suite, cuts = OneTurn(), []
    sampling = Sampling(
        temperature=0.0, max_turn_tokens=900, max_trajectory_tokens=1000, stop=["never", stop]
    )
    task = Task(task_id="t", env="e", group_id="g", group_size=1, sampling=sampling)

    async def emit(new):
        cuts.extend(new)

    async def play():
        pool, runner = GeneratorPool("stopper", 60.0), EnvironmentRunner(calls=1)
        pool.update([info])
        lease = LeaseTask(lease_id="l", attempt=0, task=task)
        try:
            await Episode(lease, suite, Numbers(), pool, Bounds(), emit, runner, way_of_playing).run()
        finally:
            pool.close()
            runner.close()

    asyncio.run(play())
    (cut,) = cuts
    assert cut.arrays["token_ids"].tolist() == [*PROMPT, *whole.ids[:end]]
    logps = cut.arrays["logp_behaviour"][len(PROMPT) :].tolist()
    assert logps == pytest.approx(whole.logps[:end], abs=1e-4)
    assert (cut.segment.status, cut.segment.stop_reason, cut.segment.action_tokens) == (
        "finished",
        "stop",
        end,
    )
    assert suite.action == text[: text.index(stop)]
