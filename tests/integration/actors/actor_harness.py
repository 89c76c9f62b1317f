"""Surroundings of an actor under test: a broker that leases and records, and scripted generators."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import zmq

from launch.model import make_tokenizer, save_tokenizer
from protocol.codec import AnyMessage, encode, encode_arrays, messages_in, unpack_arrays
from protocol.messages.episodes import (
    LeaseTask,
    Sampling,
    Segment,
    SegmentAck,
    SegmentCredit,
    Task,
    TaskCredit,
    TaskRejected,
)
from protocol.messages.peers import (
    Abort,
    Chunk,
    Generate,
    GeneratorInfo,
    Generators,
    Goodbye,
    Heartbeat,
    Hello,
    Welcome,
)
from protocol.sockets import AsyncSocket, router

DEADLINE_S = 300.0

ENV_FILE = '''
"""Counts up: the policy has to answer each number with the next one, `turns` times."""
from envs.base import StepResult

class Episode:
    def __init__(self, turns): self.turns, self.number = turns, 0
    async def reset(self, data):
        self.number = data["index"]
        if data.get("raise"): raise RuntimeError("this task is broken")
        return [{"role": "user", "content": str(self.number)}]
    async def step(self, action):
        right = action == str(self.number + 1)
        self.number += 2
        self.turns -= 1
        done = self.turns == 0
        return StepResult(None if done else {"role": "tool", "content": str(self.number)},
                          {"step": float(right)}, done, right if done else None)
    async def close(self): pass

class Counting:
    def __init__(self, turns=2): self.turns = turns
    def episode(self): return Episode(self.turns)
    def demonstration(self, index, split): raise LookupError("none")
    def gauges(self): return {"own_gauge": 1.0}
    async def close(self): pass
'''


async def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until the condition holds. When time runs out, the error says what was awaited."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s:g} s in vain: {what}"
        await asyncio.sleep(0.01)


class NotingBroker:
    """A broker that welcomes, grants credit, leases tasks on request, acknowledges, and records messages."""

    def __init__(self, *, ack: str = "stored", credit: int = 64) -> None:
        socket = router(zmq.Context.instance())
        socket.bind("tcp://127.0.0.1:0")
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket = AsyncSocket(socket, self._received)
        self.ack, self.credit, self.run = ack, credit, "r"
        self.generators: list[GeneratorInfo] = []
        self.hellos: list[Hello] = []
        self.segments: list[tuple[Segment, dict]] = []
        self.rejected: list[TaskRejected] = []
        self.beats: list[Heartbeat] = []
        self.credits: list[int] = []
        self.goodbyes: list[Goodbye] = []

    def send(self, message, peer: str = "actor-0") -> None:
        self._socket.send([peer.encode(), *encode(message)])

    def lease(self, task: Task, attempt: int = 0) -> None:
        self.send(LeaseTask(lease_id=f"lease-{task.task_id}-{attempt}", attempt=attempt, task=task))

    def list_generators(self, *generators: "ScriptedGenerator") -> None:
        self.generators = [GeneratorInfo(peer=g.name, endpoint=g.endpoint) for g in generators]
        if self.hellos:
            self.send(Generators(generators=self.generators))

    def of(self, task_id: str) -> list[tuple[Segment, dict]]:
        return [pair for pair in self.segments if pair[0].task_id == task_id]

    def closed(self) -> dict[str, Segment]:
        """Return the closing segments by task id."""
        return {s.task_id: s for s, _ in self.segments if s.status != "unfinished"}

    def gauge(self, name: str) -> float | None:
        """Return a gauge of the newest heartbeat, or None before the first heartbeat."""
        return self.beats[-1].gauges[name] if self.beats else None

    def close(self) -> None:
        self._socket.close()

    def _welcome(self, attempt: int) -> Welcome:
        return Welcome(run=self.run, epoch=0, heartbeat_s=0.2, policy_version=0, attempt=attempt)

    def _received(self, frames: list[bytes]) -> None:
        for message, rest in messages_in(frames[1:], "the actor"):
            self._take(message, rest)

    def _take(self, message: AnyMessage, rest: list[bytes]) -> None:
        match message:
            case Hello():
                self.hellos.append(message)
                self.send(self._welcome(message.attempt))
                self.send(Generators(generators=self.generators))
                self.send(SegmentCredit(segments=self.credit))
            case Segment():
                self.segments.append((message, unpack_arrays(message.arrays, rest[0])))
                if self.ack:
                    ack = SegmentAck(
                        trajectory_id=message.trajectory_id, index=message.index, status=self.ack
                    )
                    self.send(ack)
                    self.send(SegmentCredit(segments=1))
            case TaskRejected():
                self.rejected.append(message)
            case TaskCredit():
                self.credits.append(message.tasks)
            case Heartbeat():
                self.beats.append(message)
            case Goodbye():
                self.goodbyes.append(message)


class ScriptedGenerator:
    """A generator that answers with the tokens of ``answer(prompt text)``, one a chunk, ``pause_s`` apart."""

    def __init__(self, name: str, tokenizer, answer: Callable[[str], str], *, pause_s=0.0, version=0) -> None:
        socket = router(zmq.Context.instance())
        socket.bind("tcp://127.0.0.1:0")
        self.name, self.endpoint = name, socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket = AsyncSocket(socket, self._received)
        self._tokenizer, self._answer, self._pause_s = tokenizer, answer, pause_s
        self.version = version
        self.stuck_after: int | None = None
        self.requests: list[Generate] = []
        self.prompts: list[str] = []
        self.aborted: list[str] = []
        self.tokens = 0
        self._running: dict[str, asyncio.Task] = {}

    def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        self._socket.close()

    def _received(self, frames: list[bytes]) -> None:
        for message, rest in messages_in(frames[1:], "the actor"):
            self._take(frames[0], message, rest)

    def _take(self, peer: bytes, message: AnyMessage, rest: list[bytes]) -> None:
        if isinstance(message, Generate):
            ids = unpack_arrays(message.arrays, rest[0])["token_ids"].tolist()
            self.requests.append(message)
            self.prompts.append(self._tokenizer.decode(ids, skip_special_tokens=False))
            self._running[message.request_id] = asyncio.create_task(self._serve(peer, message, ids))
        elif isinstance(message, Abort):
            self.aborted.append(message.request_id)

    async def _serve(self, peer: bytes, request: Generate, prompt: list[int]) -> None:
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        before, _, begun = text.rpartition("<assistant>")
        answer = self._answer(before)
        assert answer.startswith(begun), f"asked to continue {begun!r} of {answer!r}"
        ids = [*self._tokenizer.encode(answer[len(begun) :], add_special_tokens=False).ids]
        ids = [*ids, self._tokenizer.token_to_id("<eos>")][: request.max_tokens]
        for number, token in enumerate(ids):
            if self.stuck_after is not None and number >= self.stuck_after:
                return
            await asyncio.sleep(self._pause_s)
            last = number == len(ids) - 1
            stop = token == self._tokenizer.token_to_id("<eos>")
            arrays = {
                "token_ids": np.array([token], "i4"),
                "logp_behaviour": np.array([-0.25], "f4"),
                "policy_version": np.array([self.version], "i4"),
            }
            reason = ("stop" if stop else "length") if last else ""
            chunk = Chunk(request_id=request.request_id, offset=number, finish_reason=reason)
            self._socket.send([peer, *encode_arrays(chunk, arrays)])
            self.tokens += 1


def model_folder(folder):
    """Save a tiny model's tokenizer in ``folder``. Return the folder and the tokenizer."""
    tokenizer = make_tokenizer(["12 +", "7 -"])
    save_tokenizer(tokenizer, folder, max_length=256)
    return folder, tokenizer


def counting_task(task_id: str, index: int = 10, **more) -> Task:
    fields = {"group_id": "g", "group_size": 4, "sampling": Sampling(max_trajectory_tokens=128)} | more
    data = {"index": index} | fields.pop("data", {})
    return Task(task_id=task_id, env=fields.pop("env", "counting"), data=data, **fields)


def next_number(text: str) -> str:
    """Return the right answer in the counting environment."""
    return str(int(text.replace("<user>", " ").replace("<tool>", " ").replace("<eos>", " ").split()[-1]) + 1)


def start_actor(broker: str, model, env: str, params=None, before: str = "", **config) -> subprocess.Popen:
    """Start an actor in a process of its own, which runs the code ``before`` first."""
    code = (
        f"{before}\n"
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        "from actors.actor import run_actor\n"
        "from actors.config import ActorConfig\n"
        "from envs.registry import EnvConfig\n"
        f"run_actor(ActorConfig(**{config!r}), name='actor-0', broker={broker!r}, model={str(model)!r},\n"
        f"          env=EnvConfig(name={env!r}, params={params or {}!r}), run='r')\n"
    )
    return subprocess.Popen([sys.executable, "-c", code])
