"""An environment behind a server of openenv-core, in a virtual environment of its own, is played as any other."""

import asyncio
import subprocess

import pytest

from envs.errors import ServerLost
from envs.registry import make_suite
from tests.campaigns.harnesses.program import programs_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak]
SERVER = """
import socket
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    number: int

class Answer(Observation):
    text: str = ""

class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.secret = seed % 16
        return Answer(text="Guess a number below 16.")

    def step(self, action, **more):
        if action.number == self.secret:
            return Answer(text="Yes.", reward=1.0, done=True)
        return Answer(text="higher" if action.number < self.secret else "lower", reward=-0.1)

    @property
    def state(self):
        return State()

app = create_app(Guessing, Guess, Answer, max_concurrent_envs=2)
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
"""


@pytest.fixture
def url(root):
    python = programs_of("openenv", root / "build" / "harnesses") / "python"
    process = subprocess.Popen([python, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


def test_episodes_of_a_real_server_are_played(url):
    suite = make_suite("openenv", {"url": url, "action": "number", "field": "text", "solved_at": 0.5})

    async def solve(index):
        env = suite.episode()
        messages = await env.reset({"index": index, "split": "train"})
        low, high = 0, 15
        while True:
            result = await env.step(f"<think>half</think>{(low + high) // 2}")
            if result.done:
                await env.close()
                return messages, result
            said = result.messages()[0]["content"]
            low, high = ((low + high) // 2 + 1, high) if said == "higher" else (low, (low + high) // 2 - 1)

    async def main():
        # Both sessions that the server allows are open at a time.
        solved = await asyncio.gather(solve(2), solve(5))
        envs = [suite.episode() for _ in range(3)]
        await asyncio.gather(*(env.reset({"index": 0, "split": "train"}) for env in envs[:2]))
        refused = await envs[0].step("many")
        full = make_suite("openenv", {"url": url, "action": "number", "timeout_s": 1.0}).episode()
        with pytest.raises(ServerLost, match="no room"):
            await full.reset({"index": 0, "split": "train"})
        for env in [*envs, full]:
            await env.close()
        return solved, refused

    solved, refused = asyncio.run(main())
    for messages, result in solved:
        assert messages == [{"role": "user", "content": "Guess a number below 16."}]
        assert (result.done, result.correct) == (True, True)
        assert result.rewards == {"reward": 1.0}
    assert "no action of the environment" in refused.messages()[0]["content"]
    assert refused.info["refused_actions"] == 1
