"""Test a generator's requests and updates around a small fake engine, without sockets and vLLM."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from actors.config import GeneratorConfig
from actors.errors import EngineFailed, RequestRefused, UpdateRefused
from actors.generator.engine import AlwaysAwake, ModelFacts
from actors.generator.requests import HOLD_TIMEOUT_S
from actors.generator.serving import KEEP_ALIVE_S, Serving
from actors.generator.weights.staging import Announced, NewestWins, Stage, WeightUpdater
from actors.sampled import Sampled
from protocol.codec import decode, enclose, encode, encode_arrays, unpack_arrays
from protocol.messages.peers import Abort, Drain, Generate
from protocol.weights.files import write_version

FACTS = ModelFacts(vocab_size=50, eos_ids=[1, 2], shapes={"a": ("F32", (2,))})


def sampled(ids, logp, version, finish_reason=""):
    n = len(ids)
    return Sampled(np.array(ids, "i4"), np.full(n, logp, "f4"), np.full(n, version, "i4"), finish_reason)


class EchoEngine(AlwaysAwake):
    """An engine that answers with the prompt: two tokens at once, and the others when ``go`` is set."""

    kv = "recomputed"

    def __init__(self) -> None:
        self.version = 0
        self.go = asyncio.Event()
        self.aborted = set()
        self.requests = []
        self.error = None
        self.applied = []

    async def generate(self, request):
        self.requests.append(request)
        if self.error:
            raise self.error
        yield sampled(request.prompt[:2], -0.5, self.version)
        await self.go.wait()
        finish = "abort" if request.id in self.aborted else "stop"
        rest = [] if finish == "abort" else request.prompt[2:]
        yield sampled(rest, -0.25, self.version, finish)

    async def abort(self, request_id):
        self.aborted.add(request_id)
        self.go.set()

    async def apply_weights(self, manifest, data):
        if self.error:
            raise self.error
        assert data.exists()
        self.applied.append(manifest.version)
        self.version = manifest.version
        return 0.125

    def health(self):
        return ""

    def gauges(self):
        return {}

    async def close(self):
        pass


class Desk:
    """A Serving, and the messages it has sent."""

    def __init__(self) -> None:
        self.engine = EchoEngine()
        self.sent = []
        self.failures = []
        self.serving = Serving(
            self.engine, GeneratorConfig(), FACTS, on_failure=self.failures.append, send=self.sent.append
        )

    def ask(self, request_id, prompt=(5, 6, 7), actor=b"actor-0", **settings) -> None:
        message = Generate(**({"request_id": request_id, "max_tokens": 8} | settings))
        frames = encode_arrays(message, {"token_ids": np.array(prompt, dtype="<i4")})
        self.serving.received([actor, *frames])

    def abort(self, request_id, actor=b"actor-0") -> None:
        self.serving.received([actor, *encode(Abort(request_id=request_id))])

    def chunks(self, request_id):
        """Return (routing id, finish reason, ids, versions, error) of each chunk sent."""
        found = []
        for actor, *frames in self.sent:
            chunk, rest = decode(frames)
            arrays = unpack_arrays(chunk.arrays, rest[0])
            if chunk.request_id == request_id:
                ids, versions = arrays["token_ids"].tolist(), arrays["policy_version"].tolist()
                assert len(arrays["logp_behaviour"]) == len(ids)
                found.append((actor, chunk.finish_reason, ids, versions, chunk.error))
        return found

    def headers(self, request_id):
        chunks = [decode(frames)[0] for _, *frames in self.sent]
        return [chunk for chunk in chunks if chunk.request_id == request_id]

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


def test_an_answer_is_streamed_to_the_actor_that_asked():
    async def main():
        desk = Desk()
        desk.ask("r", actor=b"actor-7")
        # Two actors may use equal request ids.
        desk.ask("r", actor=b"actor-8")
        await desk.settle()
        assert desk.chunks("r") == [
            (b"actor-7", "", [5, 6], [0, 0], ""),
            (b"actor-8", "", [5, 6], [0, 0], ""),
        ]
        assert desk.serving.book.running == 2
        desk.engine.go.set()
        await desk.settle()
        assert desk.chunks("r")[2:] == [
            (b"actor-7", "stop", [7], [0], ""),
            (b"actor-8", "stop", [7], [0], ""),
        ]
        assert desk.serving.book.running == 0
        assert desk.serving.book.tokens_total == 6

    asyncio.run(main())


@pytest.mark.parametrize(("asked", "stop"), [([], [1, 2]), ([9], [9]), ([9, 50], [9])])
def test_end_tokens_are_the_model_s_unless_the_request_names_others(asked, stop):
    async def main():
        desk = Desk()
        desk.ask("r", stop_token_ids=asked)
        await desk.settle()
        assert desk.engine.requests[0].stop == stop

    asyncio.run(main())


def test_requests_of_one_envelope_are_served_but_for_those_that_cannot_be(monkeypatch, caplog):
    async def main():
        desk = Desk()
        prompt = {"token_ids": np.array([5, 6, 7], dtype="<i4")}
        asked = [encode_arrays(Generate(request_id=name, max_tokens=8), prompt) for name in ("a", "b", "c")]
        [envelope] = enclose([asked[0], encode(Drain()), asked[1], asked[2]])
        add = desk.serving.book.add
        monkeypatch.setattr(
            desk.serving.book, "add", lambda key, **given: add(key, **given) if key != "2" else 1 / 0
        )
        desk.serving.received([b"actor-0", *envelope])
        await desk.settle()
        assert [request.id for request in desk.engine.requests] == ["1", "3"]
        assert "Drain is not for a generator" in caplog.text
        assert "could not be handled" in caplog.text

    asyncio.run(main())


def test_chunks_say_how_many_tokens_went_before_them():
    async def main():
        desk = Desk()
        desk.ask("r")
        desk.engine.go.set()
        await desk.settle()
        assert [chunk.offset for chunk in desk.headers("r")] == [0, 2]

    asyncio.run(main())


def test_an_error_says_where_the_answer_stood():
    async def main():
        desk = Desk()
        desk.ask("r")
        await desk.settle()
        await desk.serving.drain("half an update", timeout_s=60.0)
        assert [(chunk.offset, chunk.finish_reason) for chunk in desk.headers("r")] == [(0, ""), (2, "abort")]

    asyncio.run(main())


def test_a_fault_in_a_request_is_its_end_and_the_actor_hears_of_it():
    async def main():
        desk = Desk()
        desk.engine.error = KeyError("span")
        desk.ask("r")
        await desk.settle()
        ((_, reason, _, _, error),) = desk.chunks("r")
        assert reason == "abort"
        assert "KeyError('span')" in error
        assert desk.serving.book.keys() == []
        assert desk.failures == []

    asyncio.run(main())


def test_an_id_that_runs_already_is_refused_and_the_first_request_goes_on():
    async def main():
        desk = Desk()
        desk.ask("r")
        desk.ask("r")
        desk.engine.go.set()
        await desk.settle()
        reasons = sorted(chunk[1] for chunk in desk.chunks("r"))
        assert reasons == ["", "abort", "stop"]

    asyncio.run(main())


def test_a_refused_request_leaves_the_engine_in_service():
    async def main():
        desk = Desk()
        desk.engine.error = RequestRefused("no such seed")
        desk.ask("r")
        await desk.settle()
        assert [(chunk[1], chunk[4]) for chunk in desk.chunks("r")] == [("error", "no such seed")]
        assert desk.failures == []

    asyncio.run(main())


def test_an_actor_hears_every_few_seconds_that_its_request_is_under_way():
    async def main():
        desk = Desk()
        desk.ask("r")
        desk.ask("held", min_policy_version=3)
        await desk.settle()
        now = time.monotonic()
        desk.serving.keep_alive(now + KEEP_ALIVE_S - 1)
        assert len(desk.chunks("r")) == 1
        desk.serving.keep_alive(now + KEEP_ALIVE_S + 1)
        desk.serving.keep_alive(now + KEEP_ALIVE_S + 3)
        assert [chunk[1:4] for chunk in desk.chunks("r")] == [("", [5, 6], [0, 0]), ("", [], [])]
        assert [chunk[1:4] for chunk in desk.chunks("held")] == [("", [], [])]
        assert desk.headers("r")[-1].offset == 2
        desk.engine.go.set()
        await desk.settle()
        desk.serving.keep_alive(now + 99)
        assert desk.chunks("r")[-1][1] == "stop"

    asyncio.run(main())


def test_a_lost_engine_is_reported_once_per_request_and_to_the_owner():
    async def main():
        desk = Desk()
        desk.engine.error = EngineFailed("it is gone")
        desk.ask("r")
        await desk.settle()
        assert desk.failures == ["it is gone"]
        assert "it is gone" in desk.chunks("r")[0][4]

    asyncio.run(main())


def test_a_held_request_is_answered_when_its_time_is_up():
    async def main():
        desk = Desk()
        desk.ask("r", min_policy_version=3)
        await desk.settle()
        assert desk.chunks("r") == []
        desk.serving.expire(time.monotonic() + HOLD_TIMEOUT_S)
        ((_, reason, ids, _, error),) = desk.chunks("r")
        assert (reason, ids) == ("abort", [])
        assert "policy version 3, in service is 0" in error
        desk.engine.version = 3
        desk.serving.updated()
        await desk.settle()
        assert desk.engine.requests == []

    asyncio.run(main())


def test_abort_answers_running_held_and_unknown_requests():
    async def main():
        desk = Desk()
        desk.ask("running")
        desk.ask("held", min_policy_version=3)
        await desk.settle()
        for request_id in ("running", "held", "unknown"):
            desk.abort(request_id)
        await desk.settle()
        assert [chunk[1:3] for chunk in desk.chunks("running")] == [("", [5, 6]), ("abort", [])]
        assert [chunk[1] for chunk in desk.chunks("held")] == ["abort"]
        assert [chunk[1] for chunk in desk.chunks("unknown")] == ["abort"]
        assert desk.serving.book.keys() == []

    asyncio.run(main())


def test_draining_ends_every_request_and_takes_no_more():
    async def main():
        desk = Desk()
        desk.ask("running")
        desk.ask("held", min_policy_version=3)
        await desk.settle()
        await desk.serving.drain("", timeout_s=60.0)
        desk.ask("late")
        assert desk.chunks("running")[-1][1] == "abort"
        assert desk.chunks("held")[-1][1] == "abort"
        assert "draining" in desk.chunks("late")[0][4]

    asyncio.run(main())


def test_after_a_failure_no_token_of_the_engine_is_passed_on():
    async def main():
        desk = Desk()
        desk.ask("r")
        await desk.settle()
        await desk.serving.drain("half an update", timeout_s=60.0)
        desk.engine.go.set()
        await desk.settle()
        reasons = [(chunk[1], chunk[2]) for chunk in desk.chunks("r")]
        assert reasons == [("", [5, 6]), ("abort", [])]
        assert desk.failures == []

    asyncio.run(main())


def test_frames_that_are_no_message_are_dropped():
    async def main():
        desk = Desk()
        desk.serving.received([b"actor-0", b"nonsense"])
        desk.serving.received([b"actor-0", *encode(Generate(request_id="r", max_tokens=1))])  # no body
        await desk.settle()
        assert desk.sent == []

    asyncio.run(main())


def publish(root: Path, version: int) -> Announced:
    data = memoryview(np.zeros(2, dtype="<f4")).cast("B")
    manifest = write_version(
        root, run="r", epoch=0, version=version, shapes=FACTS.shapes, tensors=[("a", data)]
    )
    return Announced(0, version, str(manifest))


def updater(tmp_path: Path, engine: EchoEngine, failures: list) -> WeightUpdater:
    stage = Stage("g", FACTS.shapes, root=tmp_path)
    return WeightUpdater(engine, NewestWins(), stage, "r", on_failure=failures.append)


def test_an_update_is_applied_and_nothing_stays_staged(tmp_path):
    async def main():
        engine, failures = EchoEngine(), []
        up = updater(tmp_path, engine, failures)
        assert await up.update(publish(tmp_path / "w", 4))
        assert engine.applied == [4]
        assert up.gauges() == {
            "update_pause_seconds": 0.125,
            "updates_applied_total": 1.0,
            "updates_refused_total": 0.0,
            "updates_skipped_total": 0.0,
        }
        assert list(tmp_path.glob("offbeat-stage-g-*/*")) == []
        assert failures == []

    asyncio.run(main())


def test_of_several_announcements_only_the_newest_is_loaded(tmp_path):
    async def main():
        engine, applied = EchoEngine(), asyncio.Event()
        up = updater(tmp_path, engine, [])
        for version in (1, 2, 3):
            up.offer(publish(tmp_path / "w", version))
        task = asyncio.create_task(up.run(applied.set))
        await asyncio.wait_for(applied.wait(), 120.0)
        task.cancel()
        assert engine.applied == [3]
        assert up.gauges()["updates_skipped_total"] == 2.0
        up.offer(publish(tmp_path / "w", 2))
        assert up.gauges()["updates_refused_total"] == 1.0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "refused", "lost"), [(UpdateRefused("frozen"), 1.0, 0), (EngineFailed("half loaded"), 0.0, 1)]
)
def test_an_engine_that_refuses_lives_on_and_one_that_fails_is_lost(tmp_path, error, refused, lost):
    async def main():
        engine, failures = EchoEngine(), []
        engine.error = error
        up = updater(tmp_path, engine, failures)
        assert not await up.update(publish(tmp_path / "w", 4))
        assert not up.loading
        assert up.gauges()["updates_refused_total"] == refused
        assert len(failures) == lost
        up.offer(publish(tmp_path / "w", 4))
        # A version that the engine can never take is not staged again.
        assert (up._queue.take() is None) == bool(refused)

    asyncio.run(main())


@pytest.mark.parametrize("limit", ["MAX_REQUESTS", "MAX_REQUESTS_OF_ACTOR"])
def test_more_requests_than_are_held_at_a_time_are_refused_until_one_has_ended(limit, monkeypatch):
    monkeypatch.setattr(f"actors.generator.requests.{limit}", 2)

    async def main():
        desk = Desk()
        for name in "abc":
            desk.ask(name)
        await desk.settle()
        ((_, finish, _, _, error),) = desk.chunks("c")
        assert finish == "abort"
        assert error == "2 requests of this actor, 2 of all are under way"
        desk.ask("d", actor=b"actor-1")
        await desk.settle()
        assert len(desk.chunks("d")) == 1
        assert (desk.chunks("d")[0][1] == "abort") == (limit == "MAX_REQUESTS")
        desk.engine.go.set()
        await desk.settle()
        desk.ask("c")
        await desk.settle()
        assert [chunk[1] for chunk in desk.chunks("c")] == ["abort", "", "stop"]

    asyncio.run(main())


def test_a_temperature_that_is_no_number_is_refused():
    async def main():
        desk = Desk()
        desk.ask("r", temperature=float("nan"))
        await desk.settle()
        ((_, finish, _, _, error),) = desk.chunks("r")
        assert finish == "error"
        assert "temperature nan" in error
        assert desk.engine.requests == []

    asyncio.run(main())
