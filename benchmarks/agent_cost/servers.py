"""Servers whose CPU time per request `benchmarks.agent_cost` measures. Nothing is sampled in them.

Each is a process with a pipe. It gets the number of conversations of a round, and sends as many addresses with keys.
What comes next ends the round; it sends the tokens of an answer, and waits for the next round. 0 ends the process.
"""

import asyncio
import functools
import multiprocessing
import queue
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
from aiohttp import web

from actors.environments import EnvironmentRunner
from actors.episode import Bounds, Episode
from actors.generator_client import TurnRequest
from actors.play_requests import way_of_playing
from actors.render import Renderer
from actors.sampled import Sampled
from benchmarks.agent_cost.client import TURNS
from envs.agent.episode import AgentEpisode
from envs.base import Suite, TurnFacts
from envs.registry import make_suite
from protocol.arrays import SegmentArrays
from protocol.messages.episodes import LeaseTask, Sampling, Task

CALL = '{{"name":"add","arguments":{{"a":{a},"b":7}}}}'
ANSWERS = (*(CALL.format(a=turn) for turn in range(TURNS - 1)), "The sum is 19.")
"""Answers of every conversation."""
LIMIT_S = 300.0
Access = tuple[str, str]
_spawn = multiprocessing.get_context("spawn")
_opened: "queue.Queue[tuple[Access, asyncio.AbstractEventLoop, asyncio.Future[None]]]" = queue.Queue()
"""Agents that have started: address and key, and the future with which they end."""


async def run(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Tell the address and the key, and stay until the round is over. This is the agent of suite `agent`."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    _opened.put(((base_url, api_key), loop, over))
    await over
    return 0.0


class Server:
    """One of `SERVERS`, as a process.

    Args:
        name: name in `SERVERS`.
        folder: folder with the model, and with `train.jsonl`.
        bodies: answers that "bare" gives.
    """

    def __init__(self, name: str, folder: Path, bodies: Sequence[str]) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=SERVERS[name], args=(theirs, folder, list(bodies)))
        self._process.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def begin(self, count: int) -> list[Access]:
        """Begin a round. Return address and key of each conversation."""
        self._pipe.send(count)
        return cast(list[Access], self._answer())

    def end(self) -> None:
        """End the round."""
        self._pipe.send(None)
        self._answer()

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._pipe.send(0)
        self._process.join(10.0)
        self._process.terminate()

    def _answer(self) -> Any:
        if not self._pipe.poll(LIMIT_S):
            raise RuntimeError(f"a server has not answered for {LIMIT_S:g} s")
        return self._pipe.recv()


def bare(pipe: Connection, folder: Path, bodies: list[str]) -> None:
    """Serve the given bodies, the next one with each request of a conversation."""
    asyncio.run(_bare(pipe, [body.encode() for body in bodies]))


async def _bare(pipe: Connection, bodies: list[bytes]) -> None:
    seen: dict[str, int] = {}

    async def answer(request: web.Request) -> web.Response:
        name = request.match_info["session"]
        await request.read()
        turn = seen[name] = seen.get(name, -1) + 1
        return web.Response(body=bodies[turn], content_type="application/json")

    app = web.Application()
    app.router.add_post("/s/{session}/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    while count := await asyncio.to_thread(pipe.recv):
        seen.clear()
        pipe.send([(f"{address}/s/{number}/v1", "key") for number in range(count)])
        await asyncio.to_thread(pipe.recv)
        pipe.send(None)
    await runner.cleanup()


def endpoint(pipe: Connection, folder: Path, bodies: list[str]) -> None:
    """Serve the endpoint with the episodes of suite `agent`, without tokens."""
    asyncio.run(_suite(pipe, folder, tokens=False))


def actor(pipe: Connection, folder: Path, bodies: list[str]) -> None:
    """Serve the endpoint with an actor's episodes: prompts are rendered, answers decoded, and segments cut."""
    asyncio.run(_suite(pipe, folder, tokens=True))


async def _suite(pipe: Connection, folder: Path, *, tokens: bool) -> None:
    params = {"run": f"{__name__}:run", "train": str(folder / "train.jsonl"), "heldout": 0.0}
    suite = make_suite("agent", params)
    runner = EnvironmentRunner(calls=2)
    if tokens:
        renderer = Renderer(folder / "model")
        play = functools.partial(play_tokens, suite, renderer, Memory(renderer), runner)
    else:
        play = functools.partial(runner.call, play_messages, suite, what="play", timeout_s=LIMIT_S)
    while count := await asyncio.to_thread(pipe.recv):
        playing = [asyncio.ensure_future(play(number)) for number in range(count)]
        agents = [await asyncio.to_thread(_opened.get, timeout=LIMIT_S) for _ in range(count)]
        pipe.send([access for access, _, _ in agents])
        await asyncio.to_thread(pipe.recv)
        for _, loop, over in agents:
            loop.call_soon_threadsafe(over.set_result, None)
        await asyncio.gather(*playing)
        pipe.send(None)
    await runner.call(suite.close, what="close", timeout_s=LIMIT_S)
    runner.close()


async def play_messages(suite: Suite, number: int) -> None:
    """Answer one conversation on the endpoint."""
    episode = cast(AgentEpisode, suite.episode())
    await episode.reset({"index": number, "split": "train"})
    for answer in ANSWERS:
        episode.turn_facts(TurnFacts(100, len(answer), cut=False))
        await episode.step(answer)
    await episode.close()


async def play_tokens(
    suite: Suite, renderer: Renderer, policy: "Memory", runner: EnvironmentRunner, number: int
) -> None:
    """Answer one conversation as an actor does."""

    async def emit(cuts: Sequence[SegmentArrays]) -> None:
        pass

    task = Task(
        task_id=f"{number}", env="agent", group_id="g", group_size=1, data={"index": number, "split": "train"},
        deadline_s=LIMIT_S, sampling=Sampling(max_turn_tokens=256, max_trajectory_tokens=4096),
    )  # fmt: skip
    bounds, lease = Bounds(env_timeout_s=LIMIT_S), LeaseTask(lease_id="l", attempt=0, task=task)
    episode = Episode(lease, suite, renderer, policy, bounds, emit, runner, way_of_playing)
    await episode.run()
    if episode.status != "finished":
        raise RuntimeError(f"an episode ended as {episode.status}")


class Memory:
    """A policy that has its answers as tokens already."""

    def __init__(self, renderer: Renderer) -> None:
        self._answers = []
        for answer in ANSWERS:
            ids = np.array([*renderer.encode(answer), renderer.eos_ids[0]], "i4")
            self._answers.append((ids, np.full(len(ids), -1.0, "f4"), np.zeros(len(ids), "i4")))

    async def turn(self, request: TurnRequest) -> AsyncGenerator[Sampled, None]:
        """Answer one request, as a pool of generators does."""
        yield Sampled(*self._answers[request.turn], "stop")


SERVERS = {"bare": bare, "endpoint": endpoint, "actor": actor}
