"""Brings the tensors of a version's file to memory and to a GPU: mapped ahead, read by threads, by pinned memory.

It imports torch, and runs in the engine's worker process.
"""

import ctypes
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from actors.generator.weights.staging import TensorRow
from protocol.weights.format import TORCH_DTYPES

_TORCH = {name: getattr(torch, dtype) for name, dtype in TORCH_DTYPES.items()}


def tensors_in(data: torch.Tensor, rows: Iterable[TensorRow]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors. A tensor at a multiple of its item size shares ``data``; others are copies.

    Args:
        data: the file, as uint8.
        rows: rows of `actors.generator.weights.staging.tensor_table`.

    Example:
        >>> file = torch.tensor([7, 0, 0, 128, 63], dtype=torch.uint8)  # 1.0 from the second byte on
        >>> [(name, tensor.tolist()) for name, tensor in tensors_in(file, [["a", "F32", [1], 1, 4]])]
        [('a', [1.0])]
    """
    for name, dtype, shape, offset, nbytes in rows:
        item = _TORCH[dtype]
        part = data[offset : offset + nbytes]
        yield name, (part.clone() if offset % item.itemsize else part).view(item).view(shape)


POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14. An older kernel refuses it, and pages are mapped when they are read."""
TIMEOUT_S = 300.0
"""Longest time to map a file: one of 140 GB takes some seconds."""
PIECE_BYTES = 256 * 2**20
"""Bytes of a call."""


class FileAhead:
    """Maps one file at a time; a worker of an engine has one."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "mapping weights")
        self._path = ""
        self._data: Future[torch.Tensor] | None = None

    def begin(self, path: str) -> None:
        """Begin to map a file, and return at once."""
        self._path, self._data = path, self._pool.submit(mapped, path)

    @property
    def ready(self) -> bool:
        """Whether the file that was begun is mapped, or cannot be; `take` says which."""
        return self._data is not None and self._data.done()

    def take(self, path: str) -> torch.Tensor:
        """Return a file's bytes, uint8. One that was not begun is mapped now.

        Raises:
            RuntimeError: the file cannot be mapped.
        """
        data, self._data = self._data, None
        if data is None or self._path != path:
            return mapped(path)
        try:
            return data.result(TIMEOUT_S)
        except TimeoutError:
            raise RuntimeError(
                f"{path} was not mapped within {TIMEOUT_S:g} s; look at the free memory and the disks of this host"
            ) from None


def file_bytes(path: str) -> torch.Tensor:
    """Return the bytes of a file, uint8. Each page is mapped when it is first read."""
    return torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)


def mapped(path: str) -> torch.Tensor:
    """Return the bytes of a file, uint8, with all pages mapped.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"weights"), file.flush()
        ...     bytes(mapped(file.name).numpy())
        b'weights'
    """
    data = file_bytes(path)
    # A call through ctypes lets other threads of Python run.
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in range(0, data.nbytes, PIECE_BYTES):
        if advise(data.data_ptr() + start, min(PIECE_BYTES, data.nbytes - start), POPULATE_READ):
            break
    return data


SLOT_BYTES = 32 * 2**20
"""Bytes of each pinned buffer, and of the tensors that are sent together."""
READERS = min(10, len(os.sched_getaffinity(0)))
"""Threads that read. Each fills a buffer, and two more buffers are on their way to the GPU."""


@dataclass
class Run:
    """Tensors that lie one behind the other in the file, and that go to the device together."""

    start: int
    end: int
    rows: list[TensorRow] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.end - self.start


def runs(rows: Iterable[TensorRow], limit: int) -> Iterator[Run]:
    """Join tensors into runs of at most ``limit`` bytes. A larger tensor has a run of its own.

    Example:
        >>> rows = [["a", "U8", [2], 0, 2], ["b", "U8", [1], 2, 1], ["c", "U8", [9], 3, 9], ["d", "U8", [1], 20, 1]]
        >>> [[name for name, *_ in run.rows] for run in runs(rows, 4)]
        [['a', 'b'], ['c'], ['d']]
    """
    run: Run | None = None
    for row in rows:
        offset, nbytes = row[-2:]
        if run is not None and (offset != run.end or run.nbytes + nbytes > limit):
            yield run
            run = None
        if run is None:
            run = Run(offset, offset)
        run.rows.append(row)
        run.end += nbytes
    if run is not None:
        yield run


class DeviceReader:
    """Pinned buffers, kept from version to version, and the stream on which their bytes leave.

    Args:
        device: device of the engine. On a CPU the same is done without pinning and without a stream.
        slot_bytes: bytes of each buffer.
        readers: threads that read from the file.
    """

    def __init__(self, device: torch.device, slot_bytes: int = SLOT_BYTES, readers: int = READERS) -> None:
        self._device, self._slot_bytes, self._readers = device, slot_bytes, readers
        cuda, count = device.type == "cuda", readers + 2
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(count)]
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        # Invariant: the loading thread sets an event when it queues a copy out of a slot, and only then asks for the
        # slot to be filled again; the reading thread waits for the event first.
        self._sent: list[torch.cuda.Event | None] = [None] * count

    def tensors(
        self, data: torch.Tensor, rows: Iterable[TensorRow], room: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors on the device, in the order of the rows.

        Tensors for which there is no room come from the file itself, on the CPU.

        Args:
            data: the file, as uint8.
            rows: rows of `actors.generator.weights.staging.tensor_table`.
            room: free bytes of the device. A run may take half of it, because the engine makes a copy.
        """
        planned = list(runs(rows, self._slot_bytes))
        pieces = [
            (start, min(start + self._slot_bytes, run.end))
            for run in planned
            if 2 * run.nbytes <= room
            for start in range(run.start, run.end, self._slot_bytes)
        ]
        count = len(self._slots)
        with ThreadPoolExecutor(self._readers, "reading weights") as pool:
            waiting = (pool.submit(self._read, data, i % count, *piece) for i, piece in enumerate(pieces))
            # One slot less than there are: the last one is asked for when the copy out of it is queued.
            reads, taken = deque(islice(waiting, count - 1)), 0
            for run in planned:
                if 2 * run.nbytes > room:
                    yield from tensors_in(data, run.rows)
                    continue
                sent = torch.empty(run.nbytes, dtype=torch.uint8, device=self._device)
                for start in range(0, run.nbytes, self._slot_bytes):
                    read = reads.popleft()
                    read.result()
                    self._send(taken % count, sent[start : start + self._slot_bytes])
                    reads.extend(islice(waiting, 1))
                    taken += 1
                self._await()
                yield from tensors_in(sent, [[*row[:-2], row[-2] - run.start, row[-1]] for row in run.rows])

    def _read(self, data: torch.Tensor, slot: int, start: int, end: int) -> None:
        """Copy bytes of the file into a slot, once its former bytes have left. A reading thread does this."""
        if (event := self._sent[slot]) is not None:
            event.synchronize()
        # Numpy copies in this thread alone; torch would start as many threads as it may for each reader.
        np.copyto(self._slots[slot][: end - start].numpy(), data[start:end].numpy())

    def _send(self, slot: int, target: torch.Tensor) -> None:
        """Queue the copy of a slot's bytes to the device."""
        source = self._slots[slot][: len(target)]
        if self._stream is None:
            target.copy_(source)
            return
        # The memory of the target may still be in use by work that is queued on the present stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._sent[slot] = event

    def _await(self) -> None:
        """Make the work that is queued from now on wait for the copies, on the device."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that are free, or held by torch without use."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused)
