"""A generator whose background work has ended says so and stops; one that others could reach does not start."""

import asyncio

import pytest

from actors.config import GeneratorConfig
from actors.errors import EndpointRefused
from actors.generator import Generator, serve_generator
from actors.model_folder import ModelFacts


class Engine:
    version = 0


def generator():
    facts = ModelFacts(vocab_size=8, eos_ids=[1], shapes={})
    return Generator(Engine(), GeneratorConfig(), facts, stage=None, name="g", run="r")


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
    "endpoint", ["tcp://0.0.0.0:0", "tcp://*:5557", "tcp://10.0.0.1:1", "udp://127.0.0.1:1"]
)
def test_an_endpoint_that_others_can_reach_is_refused_before_anything_starts(endpoint):
    with pytest.raises(EndpointRefused, match="only loopback and ipc"):
        serve_generator(
            GeneratorConfig(endpoint=endpoint), name="g", broker="tcp://b", model="none", run="r", seed=0
        )
