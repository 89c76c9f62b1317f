"""A generator whose background work ends reports it and stops; one open to strangers does not start."""

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

import actors.generator.generator as module
from actors.config import GeneratorConfig
from actors.generator.engine import AlwaysAwake, ModelFacts
from actors.generator.generator import Generator, serve_generator
from actors.generator.weights.staging import Announced
from protocol.errors import AddressRefused
from protocol.messages.peers import Drain
from protocol.weights.format import Manifest


class Engine(AlwaysAwake):
    """An engine whose weight loads hang."""

    version = steps = 0
    full_step_s = 0.0
    frozen = ""

    def __init__(self):
        self.asked = asyncio.Event()

    def health(self):
        return ""

    def gauges(self):
        return {}

    async def apply_weights(self, manifest, data):
        self.asked.set()
        await asyncio.Event().wait()


class Staged:
    """A weight stage that takes ``seconds``."""

    def __init__(self, seconds=0.0, nbytes=0):
        self.seconds, self.nbytes, self.discarded = seconds, nbytes, 0
        self.complaints = {}

    def stage(self, announced, run):
        time.sleep(self.seconds)
        return Manifest(
            run=run, epoch=0, version=1, nbytes=self.nbytes, tensors=[], root="", chunk_bytes=1, chunks=b""
        ), Path("data")

    def discard(self, data):
        self.discarded += 1


def generator(stage=None, **settings):
    stage = stage or Staged()
    facts = ModelFacts(vocab_size=8, eos_ids=[1], shapes={})
    return Generator(Engine(), GeneratorConfig(**settings), facts, stage=stage, name="g", run="r")


def test_a_load_that_hangs_ends_the_generator_after_the_deadline_of_its_size():
    async def main():
        stage = Staged(nbytes=5_000_000)
        hanging = generator(stage, stall_timeout_s=0.5)
        loading = asyncio.create_task(hanging._updater.update(Announced(0, 1, "m")))
        async with asyncio.timeout(120):
            await hanging._engine.asked.wait()
        hanging._serving.book.add("a", min_version=0, version=0, now=0.0)
        assert not hanging.progress().busy, "nothing is expected to move"
        assert await loading is False
        assert "loading version 1 failed, the engine is lost: it took longer than 0.6 s" in hanging._failure
        assert hanging.progress().busy
        assert stage.discarded == 1

    asyncio.run(main())


def test_staging_that_hangs_ends_the_generator(monkeypatch):
    monkeypatch.setattr("actors.generator.weights.staging.STAGE_TIMEOUT_S", 0.1)

    async def main():
        hanging = generator(Staged(seconds=0.5))
        assert await hanging._updater.update(Announced(0, 1, "/far/m")) is False
        assert "version 1 took longer than 0.1 s; is /far/m on a file system that hangs?" in hanging._failure

    asyncio.run(main())


def test_an_engine_that_makes_steps_is_slow_and_one_that_makes_none_hangs():
    async def main():
        slow = generator(stall_timeout_s=8.0)
        slow._serving.book.add("a", min_version=0, version=0, now=0.0)
        now = time.monotonic()
        # No token for a minute, but a step each five seconds: prompts are computed.
        for second in range(0, 60, 5):
            slow._engine.steps += 1
            slow._watch_steps(now + second)
        assert (slow._failure, slow.progress().busy, slow.progress().progress) == ("", True, 12.0)
        assert slow.progress().patience_s == 40.0
        slow._watch_steps(now + 94)
        assert slow._failure == ""
        slow._watch_steps(now + 96)
        assert "1 requests run, and it has made no step for 41.0 s" in slow._failure

    asyncio.run(main())


def test_an_engine_with_short_steps_that_stops_is_found_in_ten_seconds_with_the_defaults():
    async def main():
        stopped = generator()
        stopped._serving.book.add("a", min_version=0, version=0, now=0.0)
        now = time.monotonic()
        for step in range(100):
            stopped._engine.steps += 1
            stopped._watch_steps(now + step * 0.5)
        stopped._watch_steps(now + 49.5 + 9.5)
        assert "the engine hangs" in stopped._failure

    asyncio.run(main())


def test_a_load_of_weights_is_no_time_without_a_step():
    async def main():
        loading = generator(stall_timeout_s=1.0)
        loading._serving.book.add("a", min_version=0, version=0, now=0.0)
        now = time.monotonic()
        loading._watch_steps(now)
        loading._updater.loading = True
        loading._watch_steps(now + 30.0)
        loading._updater.loading = False
        loading._watch_steps(now + 30.9)
        assert loading._failure == ""
        loading._watch_steps(now + 31.1)
        assert "the engine hangs" in loading._failure

    asyncio.run(main())


def test_a_generator_that_hears_no_broker_for_long_ends():
    class Link:
        class Session:
            welcome = None

            def silent_for(self, now):
                return 901.0

        session = Session()

    async def main():
        patient = generator()
        patient._link = Link()
        patient._tick()
        assert not patient._failure, "without a limit it waits for ever"
        lonely = generator()
        lonely._link, lonely._orphan_s = Link(), 900.0
        lonely._tick()
        assert lonely._stop.is_set()
        assert "the broker has not been heard for 901 s (fleet.orphan_minutes)" in lonely._orphaned

    asyncio.run(main())


@pytest.mark.parametrize(
    ("then", "over", "orphaned"),
    [("over", True, ""), ("resumed", False, "no learner"), ("", False, "")],
)
def test_a_drain_says_whether_another_start_makes_sense(then, over, orphaned):
    async def main():
        leaving = generator()
        leaving._from_broker(Drain(reason="no learner", then=then), [])
        assert (leaving._run_is_over, leaving._orphaned) == (over, orphaned)

    asyncio.run(main())


def test_updates_that_end_by_a_fault_end_the_generator():
    async def main():
        failing = generator()

        async def fault():
            raise KeyError("tensor")

        updates = asyncio.create_task(fault())
        updates.add_done_callback(failing._updates_ended)
        await asyncio.wait({updates})
        await asyncio.sleep(0)
        assert "KeyError('tensor')" in failing._failure
        assert failing._stop.is_set()

    asyncio.run(main())


def test_updates_that_are_cancelled_are_no_failure():
    async def main():
        ending = generator()
        updates = asyncio.create_task(asyncio.Event().wait())
        updates.add_done_callback(ending._updates_ended)
        await asyncio.sleep(0)
        updates.cancel()
        await asyncio.wait({updates})
        await asyncio.sleep(0)
        assert ending._failure == ""

    asyncio.run(main())


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("tcp://0.0.0.0:0", "offbeat keys make"),
        ("tcp://*:5557", "offbeat keys make"),
        ("tcp://10.0.0.1:1", "offbeat keys make"),
        ("udp://127.0.0.1:1", "tcp://HOST:PORT"),
    ],
)
def test_an_endpoint_that_others_can_reach_is_refused_before_anything_starts(endpoint, why):
    with pytest.raises(AddressRefused, match=why):
        serve_generator(
            GeneratorConfig(endpoint=endpoint), name="g", broker="tcp://b", model="none", run="r", seed=0
        )


def test_a_generator_says_what_it_does_before_and_after_its_engine_starts(tmp_path, monkeypatch, caplog):
    """vLLM's warnings were all that its own terminal showed for a minute."""
    said = []

    @contextlib.asynccontextmanager
    async def engine(config, *, model, seed):
        said.append(caplog.messages[-1])
        yield Engine()

    async def serve(generator, broker):
        said.append(caplog.messages[-1])

    monkeypatch.setattr(module, "read_model_facts", lambda folder: ModelFacts(8, [1], {}))
    monkeypatch.setattr(module, "shared_memory", lambda: tmp_path)
    monkeypatch.setattr(module, "engine_of", engine)
    monkeypatch.setattr(Generator, "serve", serve)
    with caplog.at_level("INFO"):
        asyncio.run(
            module.serve_on_loop(
                GeneratorConfig(), name="generator-0", broker="tcp://127.0.0.1:1", model="MODEL", run="r", seed=0,
                keys=None, grace_s=0.0,
            )
        )  # fmt: skip
    assert said == [
        "generator-0 starts its engine (vllm) with the model in MODEL; this may take a minute",
        "generator-0: the engine is up after 0 s; joining the broker at tcp://127.0.0.1:1",
    ]
