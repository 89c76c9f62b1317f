"""Engine on a vLLM server run by others: token ids in and out over HTTP.

The server needs ``--enable-scale-out`` (or ``--tokens-only``) and ``--generation-config vllm --logprobs-mode
processed_logprobs``; the engine checks the last at its start. To take new weights, it also needs
``VLLM_SERVER_DEV_MODE=1`` and the two settings named in `actors.generator.vllm_engine.worker`. Without these its policy
stays at version 0.

The generator passes the path of a weight file, so server and generator have to share a host. Only one
generator may use a server, and nobody else may change its weights.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from actors.config import GeneratorConfig
from actors.errors import EngineFailed, RequestRefused, UpdateRefused
from actors.generator.engine import AlwaysAwake, Request
from actors.generator.http_engine import logprobs_probe
from actors.generator.http_engine.answers import AnswerStream, choice_in
from actors.generator.weights.staging import FILE_FORMAT, tensor_table
from actors.sampled import Sampled
from protocol.messages.fields import KvPolicy
from protocol.weights.format import Manifest

log = logging.getLogger(__name__)

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


class HttpEngine(AlwaysAwake):
    """`actors.generator.engine.SamplingEngine` on a vLLM server.

    The server sends the versions of an answer only with its last chunk. Tokens that arrive before an update
    begins were sampled before it. If a request runs during an update, the engine holds back all later tokens
    until the last chunk names their versions. So versions are exact, but the last chunk is late.
    """

    def __init__(self, session: aiohttp.ClientSession, config: GeneratorConfig) -> None:
        self.kv: KvPolicy = config.kv_on_update_used
        self._session = session
        self._interval = config.stream_interval
        self._version = 0
        self.full_step_s = 0.0
        self.frozen = ""
        self._steps = self._chunks = 0
        self._failed = ""
        self._prefix = uuid.uuid4().hex[:8]
        self._streams: dict[str, AnswerStream] = {}
        self._open = asyncio.Event()
        self._open.set()
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
    def version(self) -> int:
        return self._version

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
                    if (sampled := self._take(stream, line[6:])) is not None:
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
        try:
            await self._post(f"/pause?mode=keep&clear_cache={clear}")
            await self._post("/start_weight_update")
            info = {"path": str(data), "tensors": tensor_table(manifest)}
            await self._post("/update_weights", {"update_info": info})
            await self._post("/finish_weight_update", {"weight_version": str(manifest.version)})
            await self._post("/resume")
        except asyncio.CancelledError as error:
            # This process is ending, and the model is half replaced.
            self._fail("weight update", error)
            raise
        except Exception as error:
            # The server stays paused, so that nobody samples from a model that is half replaced.
            raise self._fail("weight update", error) from error
        self._version = manifest.version
        self._open.set()
        return time.perf_counter() - began

    def health(self) -> str:
        return self._failed

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
        for probe in logprobs_probe.probes():
            async for sampled in self.generate(probe):
                logps += sampled.logp_behaviour.tolist()
        if fault := logprobs_probe.why_not_processed(logps):
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

    def _take(self, stream: AnswerStream, line: bytes) -> Sampled | None:
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

    def _fail(self, where: str, error: BaseException) -> EngineFailed:
        self._failed = f"{where}: {type(error).__name__}: {error}"
        return EngineFailed(self._failed)
