"""A harness, an actor with open sessions and a generator are killed in mid-stream: no token is lost or trained twice.

All of them are real processes: the broker, the actor, the agents, and the generator that is killed.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from protocol.messages.episodes import Sampling
from tests.integration.actors.actor_harness import ScriptedGenerator, start_actor, until
from tests.integration.actors.test_actor_with_broker import Run
from tests.integration.envs.test_agent import gone

ANSWER = "123456789012345678901234"
PROGRAM = """
import json, os, sys, urllib.request

json.load(sys.stdin)
with open(os.path.join(sys.argv[1], str(os.getpid())), "w"):
    pass
body = json.dumps({"messages": [{"role": "user", "content": "10"}], "stream": True}).encode()
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, body, head), timeout=240) as answer:
    parts = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
print("".join(part["choices"][0]["delta"].get("content") or "" for part in parts))
"""
GENERATOR = """
import asyncio, sys
from protocol.sockets import AsyncLink
from protocol.messages.peers import Hello
from tests.integration.actors.actor_harness import ScriptedGenerator, model_folder
from pathlib import Path

async def main(broker, model, answer, marker):
    _, tokenizer = model_folder(Path(model))
    generator = ScriptedGenerator("generator-0", tokenizer, lambda text: answer, version=1)
    generator.stuck_after = 5
    hello = Hello(role="generator", peer="generator-0", incarnation=1, endpoint=generator.endpoint)
    link = AsyncLink(broker, hello, lambda message, rest: None)
    while generator.tokens < 5:
        await asyncio.sleep(0.01)
    Path(marker).touch()
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


class AgentRun(Run):
    """A broker, an actor whose episodes are programs, and generators with slow answers."""

    def __init__(self, folder):
        super().__init__(folder)
        self.env, self.folder = "agent", folder
        self.pids = folder / "pids"
        self.pids.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        (folder / "rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
        (folder / "score.py").write_text(
            f"def right(row, output):\n    return float(output.strip() == {ANSWER!r})\n"
        )

    def start_actor(self, **config):
        params = {
            "run": [sys.executable, str(self.folder / "program.py"), str(self.pids)],
            "train": str(self.folder / "rows.jsonl"),
            "heldout": 0.0,
            "score": f"{self.folder / 'score.py'}:right",
        }
        more = {"segment_tokens": 4, "env_timeout_s": 240.0, "concurrent_episodes": 2} | config
        self.actor = start_actor(self.endpoint, self.model, "agent", params, **more)
        self.processes.append(self.actor)

    async def generator(self, name, **more):
        generator = await super().generator(name, **more)
        assert isinstance(generator, ScriptedGenerator)
        generator._answer = lambda text: ANSWER
        return generator

    def start_generator(self, *arguments):
        """Start a generator as a process of its own, which stands still after five tokens."""
        root = Path(__file__).parents[3]
        process = subprocess.Popen([sys.executable, "-c", GENERATOR, *arguments], cwd=root)
        self.processes.append(process)
        return process

    def put(self, *names, **more):
        sampling = Sampling(max_turn_tokens=64, max_trajectory_tokens=128)
        super().put(*names, data={"split": "train"}, sampling=sampling, deadline_s=600.0, **more)

    @property
    def programs(self):
        return [int(path.name) for path in self.pids.iterdir()]

    def ledger(self):
        with urllib.request.urlopen(f"http://{self.http}/status", timeout=60) as answer:
            return json.load(answer)["ledger"]

    def trajectories(self):
        """Return the segments of the last unit by trajectory, each of them once and in order."""
        found = {}
        for segment, arrays in self.delivered[-1][1]:
            found.setdefault(segment.trajectory_id, []).append((segment, arrays))
        for pairs in found.values():
            assert [segment.index for segment, _ in pairs] == list(range(len(pairs)))
        return found

    def sampled(self, pairs):
        """Return the text and the versions of what was sampled in a trajectory."""
        ids = np.concatenate([a["token_ids"][a["action_mask"] == 1] for _, a in pairs]).tolist()
        versions = np.concatenate([a["policy_version"][a["action_mask"] == 1] for _, a in pairs]).tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=True), versions

    async def closed(self):
        """Wait until the commit is counted. Return the tokens by outcome; together they are all that were stored."""

        def settled():
            ledger = self.ledger()
            return ledger["outcomes"]["trained"]["tokens"] > 0 and ledger["held_tokens"] == 0

        await until(settled, "the unit is committed")
        ledger = self.ledger()
        assert ledger["violation"] == ""
        tokens = {name: tally["tokens"] for name, tally in ledger["outcomes"].items() if tally["tokens"]}
        assert sum(tokens.values()) == ledger["stored"]["tokens"]
        return tokens


@pytest.fixture
def run(tmp_path):
    def play(scenario):
        async def main():
            run = AgentRun(tmp_path)
            run.start_broker()
            try:
                await scenario(run)
            finally:
                await run.close()

        asyncio.run(main())

    return play


def test_a_harness_that_is_killed_in_mid_stream_fails_its_own_episode(run):
    """What the policy had sampled by then is recorded once, as a failed trajectory, which is not trained."""

    async def scenario(run):
        slow = await run.generator("generator-0", pause_s=0.2)
        await run.learn()
        run.start_actor()
        run.put("a", "b")
        await until(lambda: len(run.programs) == 2 and slow.tokens > 4, "both stream")
        os.kill(run.programs[0], signal.SIGKILL)
        await until(lambda: run.delivered, "the group is delivered")
        found = run.trajectories()
        ends = sorted(pairs[-1][0].status for pairs in found.values())
        assert ends == ["failed", "finished"]
        [error] = [pairs[-1][0].error for pairs in found.values() if pairs[-1][0].status == "failed"]
        assert "ended with status 137" in error
        # The generator is asked to stop, and what it has sampled meanwhile does not reach the actor.
        part, whole = sorted((run.sampled(pairs)[0] for pairs in found.values()), key=len)
        assert whole == ANSWER
        assert ANSWER.startswith(part)
        sampled = sum(len(run.sampled(pairs)[1]) for pairs in found.values())
        assert sampled <= slow.tokens
        await run.closed()

    run(scenario)


def test_an_actor_that_is_killed_with_open_sessions_leaves_no_agent_and_its_tasks_run_again(run):
    async def scenario(run):
        slow = await run.generator("generator-0", pause_s=0.2)
        await run.learn()
        run.start_actor()
        run.put("a", "b")
        await until(lambda: len(run.programs) == 2 and slow.tokens > 12, "both stream")
        first = run.programs
        run.actor.kill()
        run.actor.wait()
        assert await asyncio.to_thread(lambda: all(gone(pid) for pid in first))
        slow._pause_s = 0.0
        run.start_actor()
        await until(lambda: run.delivered, "the group is delivered")
        found = run.trajectories()
        assert [pairs[-1][0].status for pairs in found.values()] == ["finished"] * 2
        assert {run.sampled(pairs)[0] for pairs in found.values()} == {ANSWER}
        assert len(run.programs) == 4, "each task ran once more"
        tokens = await run.closed()
        delivered = sum(segment.tokens for pairs in found.values() for segment, _ in pairs)
        # What the first attempts had streamed is counted, and not trained.
        assert tokens["trained"] == delivered
        assert set(tokens) <= {"trained", "superseded"}

    run(scenario)


def test_a_generator_that_is_killed_in_mid_stream_is_continued_by_another_one(run):
    async def scenario(run):
        marker = run.folder / "streaming"
        await run.learn()
        killed = run.start_generator(run.endpoint, str(run.folder / "other"), ANSWER, str(marker))
        run.start_actor(generator_timeout_s=240.0)
        run.put("a")
        await until(marker.exists, "it streams")
        killed.kill()
        killed.wait()
        second = await run.generator("generator-1", version=2)
        await until(lambda: run.delivered, "the task is delivered")
        [pairs] = run.trajectories().values()
        text, versions = run.sampled(pairs)
        assert (text, versions[:5], set(versions[5:])) == (ANSWER, [1] * 5, {2})
        assert len(versions) == 5 + second.tokens
        assert [(r.name, r.value) for segment, _ in pairs for r in segment.rewards] == [("reward", 1.0)]
        assert len(run.programs) == 1, "the agent noticed nothing"
        assert await run.closed() == {"trained": sum(segment.tokens for segment, _ in pairs)}

    run(scenario)
