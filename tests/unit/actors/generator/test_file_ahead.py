"""A version's file is mapped before it is loaded: by the worker, while the engine samples, and only on a GPU."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.generator.vllm_engine.engine import map_ahead
from actors.generator.weights import tensors
from actors.generator.weights.tensors import FileAhead


def make_file(folder, name, content):
    (folder / name).write_bytes(content)
    return str(folder / name)


def test_the_file_that_was_begun_is_taken_and_another_is_mapped_then(tmp_path):
    one, other = make_file(tmp_path, "one", b"first"), make_file(tmp_path, "other", b"second")
    ahead = FileAhead()
    assert not ahead.ready
    ahead.begin(one)
    assert bytes(ahead.take(one).numpy()) == b"first"
    ahead.begin(one)
    assert bytes(ahead.take(other).numpy()) == b"second"
    assert bytes(ahead.take(one).numpy()) == b"first"


def test_a_file_that_cannot_be_mapped_is_ready_and_taking_it_raises(tmp_path):
    ahead, missing = FileAhead(), str(tmp_path / "missing")
    ahead.begin(missing)
    ahead._data.exception(timeout=30.0)
    assert ahead.ready
    with pytest.raises(FileNotFoundError):
        ahead.take(missing)


def test_a_kernel_that_cannot_populate_maps_the_file_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "POPULATE_READ", 9999)
    assert bytes(tensors.mapped(make_file(tmp_path, "one", b"first")).numpy()) == b"first"


class Workers:
    """Two workers that have mapped the file when they are asked for the second time."""

    def __init__(self, device):
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
        self.calls = []

    async def collective_rpc(self, name, args=()):
        self.calls.append((name, *args))
        return [True, self.calls.count(("is_mapped",)) > 1]


@pytest.mark.parametrize(
    ("device", "calls"), [("cuda", [("map_ahead", "data"), ("is_mapped",), ("is_mapped",)]), ("cpu", [])]
)
def test_all_workers_of_a_gpu_have_mapped_the_file_before_the_pause(device, calls, monkeypatch):
    monkeypatch.setattr("actors.generator.vllm_engine.engine.POLL_S", 0.0)
    workers = Workers(device)
    asyncio.run(map_ahead(workers, Path("data")))
    assert workers.calls == calls
