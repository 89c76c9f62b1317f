"""Test how tensors of a file get to a device: here the CPU, through the same buffers and the same thread."""

import itertools
import threading

import pytest
import torch

from actors.generator.weights.tensors import DeviceReader, tensors_in

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
