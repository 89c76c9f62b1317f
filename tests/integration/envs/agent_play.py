"""Plays one episode of an agent as an actor does, with the template of Qwen3 and a policy that is a function."""

import asyncio
import json
from collections.abc import Callable

import numpy as np

from actors.environments import EnvironmentRunner
from actors.episode import Bounds, Episode
from actors.errors import TemplateUnusable
from actors.play_requests import way_of_playing
from actors.render import Renderer
from actors.sampled import Sampled
from envs.registry import make_suite
from learner.intake.trajectories import assemble
from protocol.messages.episodes import LeaseTask, Sampling, Task
from tests.campaigns.harnesses.program import make_renderer

END = "<|im_end|>"


def decline(monkeypatch):
    """Let no template render a request whose last message is "REFUSE"."""
    render = Renderer.prompt

    def prompt(self, messages, tools=()):
        if messages[-1]["content"] == "REFUSE":
            raise TemplateUnusable("no such word")
        return render(self, messages, tools)

    monkeypatch.setattr(Renderer, "prompt", prompt)


class Answers:
    """A policy that answers what a function makes of the prompt's text, half of it by each of two versions.

    ``behind`` is a coroutine function that is awaited before each answer.
    """

    def __init__(self, renderer, answer: Callable[[str], str], behind=None):
        self._renderer, self._answer, self._behind = renderer, answer, behind
        self.requests, self.prompts, self.sampled = [], [], []

    async def turn(self, request):
        number = len(self.requests)
        self.requests.append(request)
        self.prompts.append(self._renderer.decode(request.prompt, keep_special=True))
        if self._behind is not None:
            await self._behind(number)
        text = self._answer(self.prompts[number])
        ids = np.array(self._renderer.encode(text + END)[: request.max_tokens], "i4")
        self.sampled.append(ids.tolist())
        reason = "stop" if self._renderer.decode(ids, keep_special=True).endswith(END) else "length"
        versions = np.where(np.arange(len(ids)) < len(ids) // 2, 2 * number, 2 * number + 1).astype("i4")
        yield Sampled(ids, np.full(len(ids), -1, "f4"), versions, reason)


class Play:
    """Result of an episode."""

    def __init__(self, cuts, policy, suite):
        self.cuts, self.policy, self.gauges = cuts, policy, suite.gauges()
        self.last = cuts[-1].segment if cuts else None
        self.trajectory = assemble(cuts) if cuts else None

    @property
    def rewards(self):
        return [(r.name, r.turn, r.value) for cut in self.cuts for r in cut.segment.rewards]

    def branches_trained_once(self):
        """Check that each sampled token is in one branch of its own, and return the number of branches."""
        branches = self.trajectory.branches()
        owned = np.concatenate([branch.places[branch.own] for branch in branches])
        assert sorted(owned.tolist()) == list(range(len(self.trajectory)))
        assert self.trajectory.action_tokens == sum(map(len, self.policy.sampled))
        return len(branches)


def played(
    folder,
    run,
    answer,
    *,
    rows=None,
    behind=None,
    end_after=None,
    bounds=None,
    sampling=None,
    suite=None,
    **params,
):
    """Play the episode of the first row.

    Args:
        run: the agent, see `envs.agent.suite`.
        suite: what is played in place of a suite of ``run``, ``rows`` and ``params``.
        end_after: coroutine function that is awaited beside the episode, and after which it is cancelled.
    """
    if suite is None:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or [{"n": 1}]))
        suite = make_suite("agent", {"run": run, "train": f"{folder}/rows.jsonl", "heldout": 0.0, **params})
    renderer, cuts = make_renderer(folder), []
    policy = Answers(renderer, answer, behind)

    async def emit(new):
        cuts.extend(new)

    async def main():
        most = {"max_turn_tokens": 512, "max_trajectory_tokens": 2**15} | (sampling or {})
        task = Task(
            task_id="t", env="agent", group_id="g", group_size=1, data={"index": 0, "split": "train"},
            deadline_s=120.0, sampling=Sampling(**most),
        )  # fmt: skip
        lease = LeaseTask(lease_id="l", attempt=0, task=task)
        runner = EnvironmentRunner(calls=2)
        episode = Episode(lease, suite, renderer, policy, Bounds(**{"env_timeout_s": 60.0} | (bounds or {})),
                          emit, runner, way_of_playing)  # fmt: skip
        try:
            running = asyncio.create_task(episode.run())
            if end_after is not None:
                await end_after()
                running.cancel()
                await asyncio.wait({running}, timeout=60.0)
            else:
                await asyncio.wait_for(running, 120.0)
        finally:
            await runner.call(suite.close, what="close", timeout_s=20.0)
            runner.close()

    asyncio.run(main())
    return Play(cuts, policy, suite)
