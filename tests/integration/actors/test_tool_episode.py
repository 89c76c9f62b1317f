"""An episode with tools over the original template of Qwen3: what was sampled stays, and results share a block."""

import asyncio
import json

import numpy as np
import pytest

from actors.environments import EnvironmentRunner
from actors.episode import Bounds, Episode
from actors.play_requests import way_of_playing
from actors.sampled import Sampled
from envs.registry import make_suite
from protocol.messages.episodes import LeaseTask, Sampling, Task
from tests.campaigns.harnesses.program import make_renderer

CODE = '''
class Sums:
    def reset(self, **row):
        self.results = []

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: first number
            b: second number
        """
        self.results.append(a + b)
        return a + b

    def get_reward(self):
        return float(self.results == [19, 17])
'''
CALLS = (
    "<think>\nFirst both sums.\n</think>\n\n"
    '<tool_call>\n{"name": "add", "arguments": {"a":12,  "b": 7}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"b": -2, "a": 19}}\n</tool_call><|im_end|>'
)
RETRY = '<tool_call>\n{"name": "ad"}\n</tool_call><|im_end|>'
ANSWER = "<think>\nThere.\n</think>\n\n17<|im_end|>"


@pytest.fixture
def renderer(tmp_path):
    return make_renderer(tmp_path)


class Script:
    """A policy that answers with texts, and keeps the prompts that it saw."""

    def __init__(self, renderer, *answers):
        self.answers, self.prompts = [renderer.encode(answer) for answer in answers], []

    async def turn(self, request):
        self.prompts.append(list(request.prompt))
        ids = np.array(self.answers.pop(0), "i4")
        yield Sampled(ids, np.full(len(ids), -1, "f4"), np.zeros(len(ids), "i4"), "stop")


def test_what_was_sampled_stays_and_all_results_of_a_turn_share_a_block(renderer, tmp_path):
    (tmp_path / "sums.py").write_text(CODE)
    rows = [{"prompt": "What is 12 + 7 - 2?"}, {"prompt": "What is 12 + 7 - 2?"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = make_suite(
        "tools", {"train": f"{tmp_path}/train.jsonl", "tools": f"{tmp_path}/sums.py:Sums", "heldout": 0.0}
    )
    script, cuts = Script(renderer, CALLS, RETRY, ANSWER), []

    async def emit(new):
        cuts.extend(new)

    async def play():
        task = Task(
            task_id="t",
            env="tools",
            group_id="g",
            group_size=1,
            data={"index": 0, "split": "train"},
            deadline_s=60.0,
            sampling=Sampling(max_turn_tokens=512, max_trajectory_tokens=8192),
        )
        lease = LeaseTask(lease_id="l", attempt=0, task=task)
        runner = EnvironmentRunner(calls=2)
        try:
            episode = Episode(
                lease, suite, renderer, script, Bounds(env_timeout_s=60.0), emit, runner, way_of_playing
            )
            await episode.run()
        finally:
            await suite.close()
            runner.close()
        return episode

    episode = asyncio.run(play())
    assert episode.status == "finished", cuts[-1].segment
    first, second, third = script.prompts
    opening = renderer.decode(first, keep_special=True)
    assert '"name": "add", "description": "Add two numbers."' in opening
    assert opening.endswith("<|im_start|>user\nWhat is 12 + 7 - 2?<|im_end|>\n<|im_start|>assistant\n")
    sampled = renderer.encode(CALLS)
    assert second[: len(first) + len(sampled)] == first + sampled
    assert third[: len(second)] == second
    results = renderer.decode(second[len(first) + len(sampled) :], keep_special=True)
    assert results == (
        "\n<|im_start|>user\n<tool_response>\n19\n</tool_response>\n<tool_response>\n17\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    error = renderer.decode(third[len(second) + len(renderer.encode(RETRY)) :], keep_special=True)
    assert "Error: there is no tool 'ad'; the tools are: add" in error
    tokens = np.concatenate([cut.arrays["token_ids"] for cut in cuts]).tolist()
    assert tokens == third + renderer.encode(ANSWER)
    last = cuts[-1].segment
    rewards = {reward.name: reward.value for cut in cuts for reward in cut.segment.rewards}
    assert (rewards, last.extra["correct"], last.extra["info"]["failed_calls"]) == ({"reward": 1.0}, True, 1)
