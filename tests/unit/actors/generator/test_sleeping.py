"""An engine gives its GPU to the learner and takes it back: order, faults in between, and who waits for whom."""

import asyncio

import numpy as np
import pytest

from actors.generator.engine import Request, hold_together, sleeping
from actors.generator.weights.staging import Announced, NewestWins, WeightUpdater
from actors.sampled import Sampled, nothing
from protocol.processes import GpuLock
from protocol.weights.format import Manifest

LIMIT_S = 20.0
MANIFEST = Manifest(run="r", epoch=0, version=1, nbytes=0, tensors=[], root="", chunk_bytes=1, chunks=b"")


class Engine:
    """An engine that notes what it does; an answer has two tokens, and the second one comes when ``go`` is set."""

    kv, full_step_s, frozen, version, steps = "recomputed", 0.5, "", 3, 7

    def __init__(self):
        self.log, self.go, self.began, self.broken = [], asyncio.Event(), asyncio.Event(), ""

    async def generate(self, request):
        self.log.append("sample")
        self.began.set()
        one = np.ones(1, np.int32)
        yield Sampled(one, -one.astype(np.float32), one)
        await self.go.wait()
        yield nothing(finish_reason="stop")

    async def abort(self, request_id):
        self.log.append("abort")
        self.go.set()

    async def apply_weights(self, manifest, data):
        self.log.append("load")
        return 0.25

    async def sleep(self):
        if self.broken == "sleep":
            raise RuntimeError("no memory")
        self.log.append("sleep")

    async def wake(self):
        if self.broken == "wake":
            raise RuntimeError("no memory")
        self.log.append("wake")

    def health(self):
        return ""

    def gauges(self):
        return {"own": 1.0}


def request(name="r"):
    return Request(name, [1], max_tokens=2, temperature=1.0, top_p=1.0, top_k=0, seed=None, stop=[])


def play(scene, folder):
    """Run a scene with an engine that is awake, and the learner's view of the lock. Return what the engine did."""

    async def main():
        engine, lock, learner = Engine(), GpuLock(folder), GpuLock(folder)
        await hold_together(lock)
        async with asyncio.timeout(LIMIT_S), sleeping(engine, lock) as shared:
            await scene(engine, shared, learner)
        return engine.log

    return asyncio.run(main())


async def answer(shared, name="r"):
    return [piece async for piece in shared.generate(request(name))]


async def alone(learner, timeout_s=LIMIT_S):
    return await asyncio.to_thread(learner.wait_alone, timeout_s)


def test_the_engine_sleeps_when_the_learner_wants_the_gpu_and_wakes_for_weights(tmp_path):
    async def scene(engine, shared, learner):
        assert not learner.take_alone()
        waited = await alone(learner)
        assert (engine.log, shared.asleep, waited > 0) == (["sleep"], True, True)
        update = asyncio.create_task(shared.apply_weights(None, None))
        await asyncio.sleep(0)
        assert not update.done()
        learner.release()
        assert await update == 0.25
        assert not shared.asleep
        assert shared.gauges()["asleep_seconds_total"] > 0
        assert shared.gauges()["own"] == 1.0

    assert play(scene, tmp_path) == ["sleep", "wake", "load"]


def test_an_engine_that_nobody_wants_the_gpu_of_stays_awake(tmp_path):
    async def scene(engine, shared, learner):
        engine.go.set()
        for _ in range(3):
            assert len(await answer(shared)) == 2
        assert shared.gauges()["asleep_seconds_total"] == 0.0

    assert play(scene, tmp_path) == ["sample"] * 3


def test_no_update_begins_while_anything_is_sampled(tmp_path):
    async def scene(engine, shared, learner):
        sampling = asyncio.create_task(answer(shared))
        wanting = asyncio.create_task(alone(learner))
        await engine.began.wait()
        await shared._sleep()
        assert engine.log == ["sample"]
        assert not wanting.done()
        engine.go.set()
        assert len(await sampling) == 2
        await wanting

    assert play(scene, tmp_path) == ["sample", "sleep"]


def test_a_request_wakes_the_engine_and_one_that_was_ended_before_is_not_sampled(tmp_path):
    async def scene(engine, shared, learner):
        await alone(learner)
        engine.go.set()
        first, ended = (asyncio.create_task(answer(shared, name)) for name in ("first", "ended"))
        await asyncio.sleep(0)
        await shared.abort("ended")
        learner.release()
        assert [len(piece) for piece in await first] == [1, 0]
        assert [piece.finish_reason for piece in await ended] == ["abort"]

    assert play(scene, tmp_path) == ["sleep", "wake", "sample"]


@pytest.mark.parametrize("what", ["sleep", "wake"])
def test_an_engine_that_cannot_change_is_lost(tmp_path, what):
    async def scene(engine, shared, learner):
        engine.broken = what
        if what == "sleep":
            # It may still use the GPU, so it does not release the lock.
            with pytest.raises(TimeoutError):
                await alone(learner, timeout_s=0.3)
        else:
            await alone(learner)
            learner.release()
            await shared.apply_weights(None, None)
        assert shared.health() == f"{what}: RuntimeError: no memory"

    play(scene, tmp_path)


class Stage:
    """Weights that are there at once."""

    def stage(self, announced, run):
        return MANIFEST, None

    def discard(self, data):
        pass

    def accepted(self, manifest):
        pass


def test_the_deadline_of_a_load_does_not_count_the_learners_update(tmp_path):
    """A generator that is slow to stage a version may find the learner in its next update."""

    async def scene(engine, shared, learner):
        failures = []
        updater = WeightUpdater(
            shared, NewestWins(), Stage(), "r", on_failure=failures.append, patience_s=1.0, longest_s=1.0
        )
        await alone(learner)
        update = asyncio.create_task(updater.update(Announced(0, 1, "", (), "")))
        _, waiting = await asyncio.wait({update}, timeout=1.5)
        assert waiting == {update}
        assert updater.loading
        learner.release()
        assert await update
        assert failures == []

    assert play(scene, tmp_path) == ["sleep", "wake", "load"]
