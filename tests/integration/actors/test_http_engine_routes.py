"""Test the HTTP engine against a small server: routes that are missing, answers that break off."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiohttp import web

from actors.config import GeneratorConfig
from actors.errors import EngineFailed, RequestRefused, UpdateRefused
from actors.generator.engine import Request
from actors.generator.http_engine import TEMPERATURE, HttpEngine
from protocol.weights.format import Manifest

REQUEST = Request("1", [3, 4], 4, 1.0, 1.0, 0, None, [1])
MANIFEST = Manifest(run="r", epoch=0, version=4, nbytes=0, tensors=[], root="", chunk_bytes=1, chunks=b"")


def event(ids, finish=None, *, logp=-0.5, **more) -> bytes:
    logprobs = {"content": [{"token_id": i, "logprob": logp} for i in ids]}
    choice = {"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": finish} | more
    return b"data: " + json.dumps({"request_id": "1", "choices": [choice]}).encode() + b"\n\n"


PROBED = event([5], "length", logp=-1e-4)
"""Answer to a probe of a server that reports log-probabilities at the sampling temperature."""


class Server:
    """A server with /health and the generate route, and with the weight routes if ``updatable``."""

    def __init__(
        self,
        lines,
        *,
        updatable: bool,
        fails: str = "",
        label: str = "default",
        paused: bool = False,
        probes: Sequence[bytes] = (PROBED,) * 3,
    ):
        self.lines, self.fails, self.probes = lines, fails, list(probes)
        self.label, self.paused = label, paused
        self.calls = []
        self.hold = asyncio.Event()
        app = web.Application()
        app.router.add_get("/health", self.plain)
        app.router.add_post("/inference/v1/generate", self.generate)
        if updatable:
            for route in ("/init_weight_transfer_engine", "/update_weight_version", "/pause", "/resume"):
                app.router.add_post(route, self.plain)
            for route in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
                app.router.add_post(route, self.plain)
            app.router.add_get("/is_paused", self.plain)
            app.router.add_get("/weight_info", self.plain)
        self._runner = web.AppRunner(app)

    async def plain(self, request):
        self.calls.append(request.path)
        status = 500 if request.path == self.fails else 200
        return web.json_response({"is_paused": self.paused, "weight_version": self.label}, status=status)

    async def generate(self, request):
        response = web.StreamResponse()
        await response.prepare(request)
        probed = (await request.json())["sampling_params"]["temperature"] == TEMPERATURE
        for line in [self.probes.pop(0)] if probed else self.lines:
            if line is None:
                await self.hold.wait()
            else:
                await response.write(line)
        return response

    async def __aenter__(self):
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        self.hold.set()
        await self._runner.cleanup()


def run(server_settings, check):
    async def main():
        async with Server(**server_settings) as server:
            engine = await HttpEngine.connect(GeneratorConfig(backend="http", url=server.url))
            try:
                await check(engine, server)
            finally:
                await engine.close()

    asyncio.run(main())


async def answer(engine):
    return [sampled async for sampled in engine.generate(REQUEST)]


def test_without_weight_routes_the_policy_is_frozen_and_says_why(caplog):
    async def check(engine, server):
        with pytest.raises(UpdateRefused, match="VLLM_SERVER_DEV_MODE"):
            await engine.apply_weights(MANIFEST, Path("/nowhere"))
        (sampled,) = await answer(engine)
        assert (sampled.token_ids.tolist(), sampled.policy_version.tolist(), sampled.finish_reason) == (
            [5, 1],
            [0, 0],
            "stop",
        )

    run({"lines": [event([5, 1], "stop"), b"data: [DONE]\n\n"], "updatable": False}, check)
    assert "policy version 0 for ever" in caplog.text


def test_a_last_chunk_without_tokens_ends_an_aborted_request():
    async def check(engine, server):
        first, last = await answer(engine)
        assert (first.token_ids.tolist(), len(last), last.finish_reason) == ([5], 0, "abort")
        assert engine.health() == ""

    run({"lines": [event([5]), event([], "abort"), b"data: [DONE]\n\n"], "updatable": False}, check)


def test_tokens_on_the_way_during_an_update_are_kept_back_until_their_versions_are_told():
    spans = [{"version": "0", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4}]
    lines = [event([5]), None, event([6, 7]), event([1], "stop", weight_versions=spans)]

    async def check(engine, server):
        stream = engine.generate(REQUEST)
        first = await anext(stream)
        await engine.apply_weights(MANIFEST, Path("/file"))
        server.hold.set()
        rest = [sampled async for sampled in stream]
        assert (first.token_ids.tolist(), first.policy_version.tolist()) == ([5], [0])
        assert [(s.token_ids.tolist(), s.policy_version.tolist(), s.finish_reason) for s in rest] == [
            ([6, 7, 1], [0, 4, 4], "stop")
        ]
        steps = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
        assert server.calls[-5:] == steps
        assert engine.version == 4

    run({"lines": lines, "updatable": True}, check)


def test_a_server_that_fails_an_update_stays_paused():
    async def check(engine, server):
        with pytest.raises(EngineFailed, match="/update_weights: status 500"):
            await engine.apply_weights(MANIFEST, Path("/file"))
        assert "/resume" not in server.calls
        assert "weight update" in engine.health()

    run({"lines": [], "updatable": True, "fails": "/update_weights"}, check)


def test_a_paused_server_is_not_used():
    with pytest.raises(EngineFailed, match="it is paused"):
        run({"lines": [], "updatable": True, "paused": True}, None)


def test_a_server_that_was_updated_before_tells_its_version():
    async def check(engine, server):
        assert engine.version == 17
        assert "/update_weight_version" not in server.calls

    run({"lines": [], "updatable": True, "label": "17"}, check)


@pytest.mark.parametrize(
    ("line", "error", "said"),
    [
        (b'data: {"error": {"code": 400, "message": "too long"}}\n\n', RequestRefused, "too long"),
        (b'data: {"error": {"code": 500, "message": "broken"}}\n\n', EngineFailed, "broken"),
        (event([5]), EngineFailed, "before its last chunk"),
    ],
)
def test_errors_of_a_request_and_of_the_server_are_told_apart(line, error, said):
    async def check(engine, server):
        with pytest.raises(error, match=said):
            await answer(engine)

    run({"lines": [line], "updatable": False}, check)


@pytest.mark.parametrize(
    ("probes", "said"),
    [
        # The raw distribution after the first prompt happens to be certain.
        (
            [PROBED, *[event([5], "length", logp=logp) for logp in (-2.25, -3.0)]],
            "log-probability -2.25.*processed_logprobs",
        ),
        ([event([5], "length", logprobs=None)], "1 tokens, 0 log-probabilities"),
        ([b'data: {"error": {"code": 400, "message": "no such route"}}\n\n'], "no such route"),
    ],
)
@pytest.mark.parametrize("updatable", [True, False])
def test_a_server_with_raw_log_probabilities_is_refused(probes, said, updatable):
    with pytest.raises(EngineFailed, match=said):
        run({"lines": [], "updatable": updatable, "probes": probes}, None)


@pytest.mark.parametrize("logp", [-0.6932, -3.87], ids=["two equal logits", "all logits equal"])
def test_one_prompt_with_equal_logits_is_no_reason_to_refuse(logp):
    async def check(engine, server):
        assert not server.probes

    tied = event([5], "length", logp=logp)
    run({"lines": [], "updatable": False, "probes": [PROBED, tied, PROBED]}, check)


def test_no_server_is_an_error_that_names_the_address():
    async def main():
        with pytest.raises(EngineFailed, match=r"http://127\.0\.0\.1:9"):
            await HttpEngine.connect(GeneratorConfig(backend="http", url="http://127.0.0.1:9"))

    asyncio.run(main())
