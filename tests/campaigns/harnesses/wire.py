"""Proxy between an agent and its session, and a policy that plays its part from the text of its prompt.

The wire notes each request as it came. It can also lose the first connection: the request reaches the session, and both
connections end before there is an answer. The policy changes its version within each answer.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from unittest.mock import patch
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from aiohttp import web

from actors.generator_client import TurnRequest
from actors.sampled import FinishReason, Sampled
from envs.agent.endpoint import Endpoint
from envs.agent.session import AgentSession

CALL = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
THOUGHT = "<think>\nLet me see – café.\n</think>\n\n"
ODD = '{"b":7,  "a": 12}'
"""Arguments that most harnesses spell in another way when they send them back."""
SHELLS = {
    "exec_command": '{"yield_time_ms":9000,  "cmd": "echo $((12 + 7))"}',
    "bash": '{"description":"Adds.",  "command": "echo $((12 + 7))"}',
}
"""Tools that run a command, and odd arguments of each."""
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Word with which a command ends mini-swe-agent."""


def answer_to(prompt: str) -> str:
    """Return what the policy says to a prompt: one call, then two at a time, then a text.

    Example:
        >>> answer_to("<tools>add</tools> 12 + 7? <tool_response>19</tool_response>").count("<tool_call>")
        2
    """
    talk = prompt.rpartition("<|im_start|>system\n")[2]
    if "final_answer" in talk:
        return _smolagents(talk)
    behind = talk.rpartition("<|im_start|>user\n12 + 7?")[2]
    results = behind.count("<tool_response>")
    if "ask_worker" in talk:
        asked = ['{"input": "12 + 7?"}'], ['{"input": "12 + 7? Now."}', '{"input": "12 + 7? Again."}']
        return "19" if results >= 3 else THOUGHT + _calls("ask_worker", asked[min(results, 1)])
    if results >= 3 and SUBMIT in talk:
        return _calls("bash", [f'{{"command": "echo {SUBMIT} && echo 19"}}'])
    if results >= 3:
        return "  The sum – 19.\n\n"
    tools, _, _ = prompt.rpartition("</tools>")
    if not tools:
        return "A sum."
    for shell, arguments in SHELLS.items():
        if f'"name": "{shell}"' in tools:
            return THOUGHT + _calls(shell, [arguments] * min(results + 1, 2))
    return THOUGHT + _calls("add", [ODD] if not results else [ODD, '{"a": 1, "b": 1}'])


def _smolagents(talk: str) -> str:
    behind = talk.rpartition("12 + 7?")[2]
    seen = behind.count("Observation:")
    if "<tools>" in talk:
        if seen >= 2:
            return _calls("final_answer", ['{"answer": "19"}'])
        return _calls("add", [ODD] if not seen else [ODD, '{"a": 1, "b": 1}'])
    code = "final_answer(19)" if seen >= 3 else f"print(add(12, {7 + seen}))"
    return f"Thought: I add.\n<code>\n{code}\n</code>"


def _calls(name: str, arguments: Sequence[str]) -> str:
    return "\n".join(CALL.format(name=name, arguments=one) for one in arguments)


class ScriptedPolicy:
    """Samples the answers of `answer_to`, each in two pieces of different versions.

    Args:
        encode: text to token ids.
        decode: token ids to text.
    """

    def __init__(self, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str]) -> None:
        self._encode, self._decode = encode, decode
        self.prompts: list[list[int]] = []
        """Prompt of each turn."""
        self.sampled: list[list[int]] = []
        """Tokens of each turn."""
        self.versions: list[list[int]] = []
        """Version of each of these tokens."""

    async def turn(self, request: TurnRequest) -> AsyncGenerator[Sampled, None]:
        """Answer one request, as a pool of generators does."""
        ids = self._encode(answer_to(self._decode(request.prompt)) + "<|im_end|>")
        first, version = len(ids) // 2, 2 * len(self.prompts)
        versions = [version] * first + [version + 1] * (len(ids) - first)
        self.prompts.append(list(request.prompt))
        self.sampled.append(ids)
        self.versions.append(versions)
        parts: list[tuple[int, int, FinishReason]] = [(0, first, ""), (first, len(ids), "stop")]
        for begin, end, reason in parts:
            part = np.array(ids[begin:end], "i4")
            logps = np.full(len(part), -1.0, "f4")
            yield Sampled(part, logps, np.array(versions[begin:end], "i4"), reason)


DROPPED = ("host", "content-length", "transfer-encoding", "connection", "accept-encoding")
"""Headers of one connection."""
BODY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Seen:
    """A request, as it came."""

    dialect: str
    """End of its path."""
    streamed: bool
    again: bool
    """Whether its header says that it was sent before."""
    digest: bytes


class Wire:
    """A server that hands requests on to the endpoint.

    Args:
        lose_first: lose the connection of the first request.
    """

    def __init__(self, *, lose_first: bool) -> None:
        self.seen: list[Seen] = []
        self._lose, self._real, self._address = lose_first, "", ""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let agents get this server's address in place of the endpoint's."""
        url = Endpoint.url

        def address(endpoint: Endpoint, session: AgentSession) -> str:
            found = urlsplit(url(endpoint, session))
            self._real = f"{found.scheme}://{found.netloc}"
            return self._address + found.path

        with patch.object(Endpoint, "url", address):
            yield

    async def start(self) -> web.AppRunner:
        """Start the server. Return what is to be cleaned up."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    @property
    def dialects(self) -> str:
        """The dialects that were spoken, each once."""
        spoken = [f"{one.dialect}{', streamed' if one.streamed else ''}" for one in self.seen]
        return "; ".join(dict.fromkeys(spoken))

    @property
    def repeated(self) -> str:
        """How the first request was sent again; "" if it was not."""
        first, *later = self.seen
        for one in later:
            if one.digest == first.digest:
                return "the same bytes, and says so" if one.again else "the same bytes"
        return ""

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.method == "POST":
            dialect = request.path.rpartition("/v1/")[2]
            again = request.headers.get("x-stainless-retry-count", "0") != "0"
            streamed = bool(json.loads(body or b"{}").get("stream"))
            self.seen.append(Seen(dialect, streamed, again, blake2b(body).digest()))
            if self._lose:
                self._lose = False
                await self._lose_connection(request, body)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in DROPPED}
        async with (
            aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout()) as client,
            client.request(
                request.method, self._real + request.path_qs, data=body, headers=headers
            ) as answer,
        ):
            content = await answer.read()
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in DROPPED}
        return web.Response(status=answer.status, body=content, headers=kept)

    async def _lose_connection(self, request: web.Request, body: bytes) -> None:
        """Send the request to the session, and end both connections before there is an answer."""
        found = urlsplit(self._real)
        _, writer = await asyncio.open_connection(found.hostname, found.port)
        kept = {name: value for name, value in request.headers.items() if name.lower() not in DROPPED}
        head = [f"{request.method} {request.path_qs} HTTP/1.1", f"Host: {found.netloc}"]
        head += [*(f"{name}: {value}" for name, value in kept.items()), f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        if request.transport is not None:
            request.transport.abort()
        raise asyncio.CancelledError
