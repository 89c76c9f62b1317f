"""Deltas between versions: the compressed exclusive or of two data files. Lossless, never applied in place.

At the learning rates of reinforcement learning an optimizer step leaves most bfloat16 weights unchanged
(arXiv:2602.03839), so most of the difference is zero.
"""

import os

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocol.errors import WeightsError

LEVEL = 1
THREADS = min(4, os.cpu_count() or 1)
BLOCK_BYTES = 4 * 2**20
MAX_WINDOW_BYTES = 2**27
"""Upper limit of the memory that a zstd frame may ask for when it is decompressed."""
SAMPLES, SAMPLE_BYTES = 16, 2**16
"""Number and bytes of the samples that are compressed first, to find out whether a delta is worthwhile."""
LARGEST_SHARE = 0.3
"""Largest size of a delta, as a share of the full version.

A larger delta saves less time than making and applying it takes, even at 1 Gbit/s.
"""


def make_delta(base: int, new: int, nbytes: int, out: int, *, largest: int) -> int | None:
    """Write the delta between two files of ``nbytes`` each; all files are given as descriptors.

    Returns:
        The bytes written, or None if the delta is larger than ``largest``, or would be by the sample.
    """
    if nbytes > 4 * SAMPLES * SAMPLE_BYTES and _sampled(base, new, nbytes) * nbytes > largest:
        return None
    compressor = zstandard.ZstdCompressor(level=LEVEL, threads=THREADS).compressobj(size=nbytes)
    written = 0
    for offset in range(0, nbytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, nbytes - offset)
        written += _write(
            out, compressor.compress((_read(base, size, offset) ^ _read(new, size, offset)).data)
        )
        if written > largest:
            return None
    written += _write(out, compressor.flush())
    return written if written <= largest else None


def _sampled(base: int, new: int, nbytes: int) -> float:
    """Return the compressed size of a sample of the difference, as a share of its size."""
    step = nbytes // SAMPLES
    pieces = [
        _read(base, SAMPLE_BYTES, offset) ^ _read(new, SAMPLE_BYTES, offset)
        for offset in range(0, step * SAMPLES, step)
    ]
    sample = np.concatenate(pieces).data
    return len(zstandard.ZstdCompressor(level=LEVEL).compress(sample)) / len(sample)


def apply_delta(delta: int, base: int, out: int, nbytes: int) -> None:
    """Apply a delta to ``base`` and write the resulting file to ``out``; all files are given as descriptors.

    Raises:
        WeightsError: the delta is unreadable, or was made for files of a different size.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        with (
            open(delta, "rb", closefd=False) as source,
            decompressor.stream_reader(source, read_across_frames=False, closefd=False) as reader,
        ):
            offset = 0
            while offset < nbytes:
                piece = np.frombuffer(reader.read(min(BLOCK_BYTES, nbytes - offset)), np.uint8)
                if not len(piece):
                    raise WeightsError(f"the delta ends after {offset} of {nbytes} bytes")
                _write(out, (piece ^ _read(base, len(piece), offset)).data)
                offset += len(piece)
            if reader.read(1):
                raise WeightsError(f"the delta has more than {nbytes} bytes")
    except zstandard.ZstdError as error:
        raise WeightsError(f"the delta cannot be decompressed: {error}") from None


def _read(file: int, size: int, offset: int) -> NDArray[np.uint8]:
    content = os.pread(file, size, offset)
    if len(content) != size:
        raise WeightsError(
            f"the base ends at byte {offset + len(content)}; {size} from {offset} on were needed"
        )
    return np.frombuffer(content, np.uint8)


def _write(file: int, content: bytes | memoryview) -> int:
    view = memoryview(content)
    done = 0
    while done < len(view):
        done += os.write(file, view[done:])
    return done
