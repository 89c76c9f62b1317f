"""New policy versions out: written whole into shared memory, then announced through the broker."""

import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from learner.run_files import Published, read_published, weights_folder, write_published
from protocol.messages import PublishWeights
from protocol.weights import read_manifest, retire
from protocol.weights_files import write_version

RETIRE_S = 60.0

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


class Publisher:
    """Writes versions, keeps the newest few, and says what to announce.

    Args:
        keep: versions.
        dtype: "trained", or "bfloat16" for what is float32.
        url: where other hosts can fetch them; empty: nowhere.
    """

    def __init__(
        self, run: str, run_dir: Path, *, epoch: int, keep: int, dtype: str = "trained", url: str = ""
    ) -> None:
        self.folder = weights_folder(run_dir)
        self._run_dir = run_dir
        self.published = read_published(run_dir)
        """What learners of this run published last."""
        self._run, self._epoch, self._keep = run, epoch, keep
        self._dtype, self._url = dtype, url
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, mode=0o700)
        self.seconds = 0.0
        self._retiring: threading.Thread | None = None

    def publish(
        self,
        version: int,
        shapes: Shapes,
        tensors: Iterable[tuple[str, memoryview]],
        *,
        line: Sequence[tuple[int, int]] = (),
    ) -> PublishWeights:
        """Write ``version``, with the line of weights that led to it, and return its announcement."""
        started = time.perf_counter()
        if self._dtype == "bfloat16":
            shapes, tensors = rounded_shapes(shapes), rounded(shapes, tensors)
        self.published = Published(version, tuple(line))
        write_published(self._run_dir, self.published)
        manifest = write_version(
            self.folder, run=self._run, epoch=self._epoch, version=version, shapes=shapes, tensors=tensors
        )
        self._retire()
        self.seconds = time.perf_counter() - started
        return PublishWeights(
            epoch=self._epoch,
            version=version,
            manifest=str(manifest),
            url=self._url,
            root=read_manifest(manifest).root,
            line=list(line),
        )

    def _retire(self) -> None:
        """Delete what is old while we go on: to give memory back takes a third as long as to write it."""
        if self._retiring is not None:
            self._retiring.join(RETIRE_S)
        self._retiring = threading.Thread(
            target=retire, args=(self.folder, self._keep), name="retiring", daemon=True
        )
        self._retiring.start()

    def close(self) -> None:
        """Free the shared memory."""
        if self._retiring is not None:
            self._retiring.join(RETIRE_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def rounded_shapes(shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of tensors in bfloat16 where they were in float32.

    Example:
        >>> rounded_shapes({"a": ("F32", (2,)), "b": ("I64", (1,))})
        {'a': ('BF16', (2,)), 'b': ('I64', (1,))}
    """
    return {name: ("BF16" if dtype == "F32" else dtype, shape) for name, (dtype, shape) in shapes.items()}


def rounded(shapes: Shapes, tensors: Iterable[tuple[str, memoryview]]) -> Iterator[tuple[str, memoryview]]:
    """The tensors' bytes with float32 rounded to the nearest bfloat16; each is valid until the next."""
    import torch

    for name, data in tensors:
        if shapes[name][0] != "F32" or not data.nbytes:
            yield name, data
            continue
        exact = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.float32)
        yield name, exact.to(torch.bfloat16).view(torch.uint8).numpy().data
