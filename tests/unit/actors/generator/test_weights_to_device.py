"""A file's tensors reach a device, here the CPU, through the same buffers and thread; on a GPU it is mapped before."""

import asyncio
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from actors.generator.vllm_engine.engine import map_ahead
from actors.generator.weights import tensors
from actors.generator.weights.tensors import DeviceReader, FileAhead, tensors_in

SIZES = {"F32": 4, "BF16": 2, "U8": 1, "I64": 8}
ALL = 10**9


def file_of(*tensors):
    """Return the bytes of a file that has 8 bytes in front of its tensors, and the rows of its tensors."""
    rows, offset = [], 8
    for i, (dtype, shape) in enumerate(tensors):
        nbytes = SIZES[dtype] * torch.Size(shape).numel()
        rows.append([f"t{i}", dtype, list(shape), offset, nbytes])
        offset += nbytes
    return torch.randint(0, 256, (offset,), dtype=torch.uint8, generator=torch.manual_seed(0)), rows


def as_bytes(tensors):
    return [
        (name, t.dtype, tuple(t.shape), bytes(t.reshape(-1).view(torch.uint8).numpy())) for name, t in tensors
    ]


MIXED = [
    ("F32", (3, 5)),
    ("U8", (3,)),
    ("F32", (7,)),
    ("F32", (0,)),
    ("BF16", (60,)),
    ("I64", ()),
    ("BF16", (2, 2)),
]


@pytest.mark.parametrize("slot_bytes", [1, 7, 60, 64, 10_000])
@pytest.mark.parametrize("room", [0, 130, ALL])
def test_tensors_arrive_as_they_are_in_the_file_whatever_the_buffers(slot_bytes, room):
    data, rows = file_of(*MIXED)
    reader = DeviceReader(torch.device("cpu"), slot_bytes)
    # The second version comes through the same buffers.
    for turn in range(2):
        data = data + turn
        assert as_bytes(reader.tensors(data, rows, room)) == as_bytes(tensors_in(data, rows))


def test_tensors_stay_valid_while_later_ones_are_read():
    """The engine keeps the parts of a layer until all of them are there."""
    data, rows = file_of(*[("F32", (16,))] * 9)
    tensors = list(DeviceReader(torch.device("cpu"), 64).tensors(data, rows, ALL))
    assert as_bytes(tensors) == as_bytes(tensors_in(data, rows))


def test_rows_in_any_order_and_with_gaps_are_read():
    data, rows = file_of(*MIXED)
    chosen = [rows[5], rows[0], rows[2]]
    assert as_bytes(DeviceReader(torch.device("cpu"), 64).tensors(data, chosen, ALL)) == as_bytes(
        tensors_in(data, chosen)
    )


def test_the_next_tensors_are_read_while_the_engine_takes_these():
    data, rows = file_of(*[("U8", (10,))] * 7)
    reader, read = DeviceReader(torch.device("cpu"), 10, readers=2), threading.Semaphore(0)
    inner = reader._read

    def noted(*arguments):
        inner(*arguments)
        read.release()

    reader._read = noted
    tensors = reader.tensors(data, rows, ALL)
    next(tensors)
    assert all(read.acquire(timeout=30.0) for _ in range(4))
    assert not read.acquire(blocking=False), (
        "there are four buffers, and the first has been sent and filled again"
    )
    assert len(list(tensors)) == 6


def test_an_error_of_the_engine_ends_the_reading_thread():
    data, rows = file_of(*[("U8", (10,))] * 4)
    before = set(threading.enumerate())
    tensors = DeviceReader(torch.device("cpu"), 10).tensors(data, rows, ALL)
    list(itertools.islice(tensors, 2))
    tensors.close()
    assert set(threading.enumerate()) <= before


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
