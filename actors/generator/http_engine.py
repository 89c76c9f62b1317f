"""Engine on a vLLM server run by others: token ids in and out over HTTP."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec
import numpy as np

from actors.config import GeneratorConfig
from actors.errors import EngineFailed, RequestRefused, UpdateRefused
from actors.generator.engine import Request, VersionedEngine
from actors.generator.requests import stamp
from actors.generator.weights.staging import FILE_FORMAT, tensor_table
from actors.sampled import FinishReason, Sampled
from protocol.messages.fields import KvPolicy
from protocol.weights.format import Manifest

log = logging.getLogger(__name__)

TEMPERATURE = 1e-3
"""Sampling temperature of the probe. vLLM raises it to 0.01, the least that it computes with."""
LEAST_LOGP = -0.3
"""Smallest median log-probability, in nats, of tokens sampled at that temperature. The best logit is rarely less than
0.01 above the second one, and hardly ever after two prompts of three."""
PROMPTS = ([3], [5], [7])
"""Token ids that every vocabulary has, behind the usual special tokens. After so short a prompt a model is hardly
ever certain."""
CURE = "start the server with --logprobs-mode processed_logprobs"


def probes() -> list[Request]:
    """Return the requests of the probe, each for one token."""
    return [
        Request(f"probe-{i}", prompt, 1, TEMPERATURE, top_p=1.0, top_k=0, seed=0, stop=[])
        for i, prompt in enumerate(PROMPTS)
    ]


def why_not_processed(logps: Sequence[float]) -> str:
    """Return why a server's log-probabilities cannot be used, or "".

    Args:
        logps: log-probabilities, in nats, of the tokens that answered the probes.

    Example:
        >>> why_not_processed([-0.0, -3.9, -1e-5])
        ''
        >>> why_not_processed([-0.0, -2.5, -4.0]).partition(":")[0]
        'a token sampled at temperature 0.001 has log-probability -2.5'
    """
    usual = median(logps)
    if usual >= LEAST_LOGP:
        return ""
    return (
        f"a token sampled at temperature {TEMPERATURE:g} has log-probability {usual:.3g}: it is that of the raw "
        f"logits, not of the policy that sampled; {CURE}"
    )


class _TokenLogp(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogp] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class AnswerChoice(msgspec.Struct):
    """The part of one chunk that belongs to the only answer of a request."""

    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: FinishReason | None = None
    weight_versions: list[_Span] | None = None


class _Event(msgspec.Struct):
    choices: list[AnswerChoice] = []
    error: dict[str, Any] | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class AnswerStream:
    """One running request: the version at its start, and the tokens whose version is not known yet."""

    version: int
    sent: int = 0
    uncertain: bool = False
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def take(self, choice: AnswerChoice) -> Sampled | None:
        """Return the tokens whose versions are known with this chunk; None if none is known yet.

        Raises:
            EngineFailed: the last chunk does not tell the versions of an answer that ran during an update.
            ValueError: the spans of versions leave out a token, or numbers of tokens and log-probabilities differ.
        """
        self.ids += choice.token_ids or []
        if choice.logprobs and choice.logprobs.content:
            self.logps += [entry.logprob for entry in choice.logprobs.content]
        finish: FinishReason = choice.finish_reason or ""
        if self.uncertain and not finish:
            return None
        starts = [(self.version, 0)]
        if self.uncertain:
            if choice.weight_versions is None:
                raise EngineFailed("generate: the last chunk tells no weight versions; is this vLLM >= 0.32?")
            starts = [(int(span.version), span.start) for span in choice.weight_versions]
        end = self.sent + len(self.ids)
        sampled = Sampled(
            np.array(self.ids, np.int32),
            np.array(self.logps, np.float32),
            stamp(starts, self.sent, end) if self.ids else np.empty(0, np.int32),
            finish,
        )
        self.sent, self.ids, self.logps = end, [], []
        return sampled


def choice_in(line: bytes) -> AnswerChoice | None:
    """Return what a chunk says of the answer; None if it says nothing.

    Args:
        line: the chunk as JSON.

    Raises:
        RequestRefused: the server says that the request is at fault.
        EngineFailed: the server says that it is at fault itself.
        MsgspecError: the chunk has a different form.
    """
    event = _decode_event(line)
    if event.error is not None:
        said = f"status {event.error.get('code')}: {event.error.get('message', event.error)}"
        raise RequestRefused(said) if 400 <= event.error.get("code", 500) < 500 else EngineFailed(said)
    if not event.choices:
        return None
    return event.choices[0]


HEALTH_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 30.0
UNLABELLED = "default"
STEPS = "vllm:iteration_tokens_total_count"
"""Metric of the server that counts its engine's steps."""


def steps_of(metrics: str) -> int:
    """Return the number of engine steps that a vLLM server's page /metrics shows; 0 if it shows none.

    Example:
        >>> steps_of('vllm:iteration_tokens_total_count{engine="0",model_name="m"} 17.0')
        17
    """
    lines = (line for line in metrics.splitlines() if line.startswith(STEPS))
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


class HttpEngine(VersionedEngine):
    """`actors.generator.engine.SamplingEngine` on a vLLM server.

    The server sends the versions of an answer only with its last chunk. Tokens that arrive before an update
    begins were sampled before it. If a request runs during an update, the engine holds back all later tokens
    until the last chunk names their versions. So versions are exact, but the last chunk is late.
    """

    def __init__(self, session: aiohttp.ClientSession, config: GeneratorConfig) -> None:
        super().__init__()
        self.kv: KvPolicy = config.kv_on_update_used
        self._session = session
        self._interval = config.stream_interval
        self.full_step_s = 0.0
        self.frozen = ""
        self._steps = self._chunks = 0
        self._prefix = uuid.uuid4().hex[:8]
        self._streams: dict[str, AnswerStream] = {}
        self._watch = asyncio.create_task(self._watch_health(), name="server health")

    @classmethod
    async def connect(cls, config: GeneratorConfig) -> "HttpEngine":
        """Connect to the server at ``config.url``, find out whether it takes weights, and check its
        log-probabilities.

        Raises:
            ValueError: ``config.url`` is empty.
            EngineFailed: the server does not answer, reports log-probabilities of the raw logits, or cannot be
                used for a different reason.
        """
        if not config.url:
            raise ValueError('[generator] backend = "http" needs url, the base URL of a vLLM server')
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=HEALTH_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        session = aiohttp.ClientSession(config.url, timeout=timeout, connector=connector)
        engine = cls(session, config)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await engine._find_weight_routes()
                await engine._check_logprobs()
        except (aiohttp.ClientError, TimeoutError, EngineFailed, RequestRefused) as error:
            await engine.close()
            said = str(error) or f"no answer within {CONNECT_TIMEOUT_S:g} s"
            raise EngineFailed(f"the vLLM server at {config.url} cannot be used: {said}") from error
        return engine

    @property
    def steps(self) -> int:
        # A server that keeps no statistics shows its progress by the chunks of its answers alone.
        return self._steps + self._chunks

    async def generate(self, request: Request) -> AsyncIterator[Sampled]:
        await self._open.wait()
        stream = self._streams[request.id] = AnswerStream(self._version)
        try:
            async with self._session.post("/inference/v1/generate", json=self._body(request)) as response:
                if response.status >= 500:
                    raise EngineFailed(f"generate: status {response.status}: {await response.text()}")
                if response.status != 200:
                    raise RequestRefused(f"status {response.status}: {await response.text()}")
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    # Not the truth value: the last chunk of an aborted request may hold no tokens.
                    if (sampled := self._take_chunk(stream, line[6:])) is not None:
                        yield sampled
                        if sampled.finish_reason:
                            return
                raise EngineFailed("generate: the server ended an answer before its last chunk")
        except (aiohttp.ClientError, msgspec.MsgspecError, ValueError) as error:
            if isinstance(error, RequestRefused):
                raise
            raise self._fail("generate", error) from error
        finally:
            del self._streams[request.id]

    async def abort(self, request_id: str) -> None:
        # The server puts "generate-tokens-" before the id that `_body` sends.
        ids = [f"generate-tokens-{self._prefix}-{request_id}"]
        # The health watch reports a server that does not answer.
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._post("/inference/v1/abort_requests", {"request_ids": ids})

    async def apply_weights(self, manifest: Manifest, data: Path) -> float:
        if self.frozen:
            raise UpdateRefused(f"the policy of this server is frozen: {self.frozen}")
        self._open.clear()
        for stream in self._streams.values():
            stream.uncertain = True
        began = time.perf_counter()
        clear = str(self.kv == "recomputed").lower()
        # After an error the server stays paused, so that nobody samples from a model that is half replaced.
        with self._replacing_weights(manifest.version):
            await self._post(f"/pause?mode=keep&clear_cache={clear}")
            await self._post("/start_weight_update")
            info = {"path": str(data), "tensors": tensor_table(manifest)}
            await self._post("/update_weights", {"update_info": info})
            await self._post("/finish_weight_update", {"weight_version": str(manifest.version)})
            await self._post("/resume")
        return time.perf_counter() - began

    def gauges(self) -> dict[str, float]:
        # The server publishes its own numbers at its /metrics.
        return {}

    async def close(self) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._session.close()

    async def _find_weight_routes(self) -> None:
        async with self._session.get("/health") as response:
            if response.status != 200:
                raise EngineFailed(f"/health answers with status {response.status}")
        async with self._session.post(
            "/init_weight_transfer_engine", json={"init_info": {"format": FILE_FORMAT}}
        ) as response:
            if response.status != 200:
                self.frozen = (
                    f"/init_weight_transfer_engine answers with status {response.status}; start the server "
                    "with VLLM_SERVER_DEV_MODE=1, --worker-extension-cls actors.vllm_worker.WeightWorker and "
                    '--weight-transfer-config \'{"backend": "offbeat_file"}\''
                )
                log.warning("policy version 0 for ever: %s", self.frozen)
                return
        async with self._session.get("/is_paused") as response:
            if (await response.json())["is_paused"]:
                raise EngineFailed("it is paused, perhaps by an update that failed; restart it")
        async with self._session.get("/weight_info") as response:
            label = (await response.json())["weight_version"]
        if label == UNLABELLED:
            await self._post("/update_weight_version", {"new_version": "0"})
        else:
            self._version = int(label)

    async def _check_logprobs(self) -> None:
        logps: list[float] = []
        for probe in probes():
            async for sampled in self.generate(probe):
                logps += sampled.logp_behaviour.tolist()
        if fault := why_not_processed(logps):
            raise EngineFailed(fault)

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "request_id": f"{self._prefix}-{request.id}",
            "token_ids": request.prompt,
            "stream": True,
            "sampling_params": {
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k,
                "seed": request.seed,
                "ignore_eos": True,
                "stop_token_ids": request.stop,
                "logprobs": 0,
                "detokenize": False,
                "stream_interval": self._interval,
            },
        }
        if self.kv == "kept":
            body["cache_salt"] = f"v{self._version}"
        return body

    def _take_chunk(self, stream: AnswerStream, line: bytes) -> Sampled | None:
        if (choice := choice_in(line)) is None:
            return None
        self._chunks += 1
        return stream.take(choice)

    async def _post(self, route: str, body: dict[str, Any] | None = None) -> None:
        async with self._session.post(route, json=body or {}) as response:
            if response.status != 200:
                raise EngineFailed(f"{route}: status {response.status}: {(await response.text())[:500]}")

    async def _watch_health(self) -> None:
        while not self._failed:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            try:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    async with self._session.get("/health") as response:
                        if response.status != 200:
                            self._failed = f"/health answers with status {response.status}"
                    async with self._session.get("/metrics") as response:
                        if response.status == 200:
                            self._steps = steps_of(await response.text())
            except (aiohttp.ClientError, TimeoutError) as error:
                self._failed = f"the server does not answer: {type(error).__name__}: {error}"
