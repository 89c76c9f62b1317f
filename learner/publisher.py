"""Publishes policy versions: writes each whole into shared memory; the broker then announces it."""

import logging
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from learner.run_files import PublishedVersion, newest_epoch, read_published, weights_folder, write_published
from protocol.messages import PublishWeights
from protocol.private_paths import taken
from protocol.weights.files import write_version
from protocol.weights.format import Shapes, read_manifest, retire
from protocol.weights.preallocated import PreallocatedFile

log = logging.getLogger(__name__)

GENERATORS_BYTES_PER_S = 500e6
"""Approximate bytes that the generators of this host verify and load in a second, using all its cores."""


class Publisher:
    """Writes versions, deletes old ones, and returns the announcement of each.

    Args:
        epoch: number of this learner process in the run.
        keep: number of versions that stay in the folder.
        dtype: "trained", or "bfloat16" to round float32 tensors.
        url: address from which other hosts can fetch versions; empty: only this host can.

    Raises:
        NameTaken: a different user has the name of the folder in shared memory.
    """

    def __init__(
        self, run: str, run_dir: Path, *, epoch: int, keep: int, dtype: str = "trained", url: str = ""
    ) -> None:
        self.folder = weights_folder(run_dir)
        self._run_dir = run_dir
        self.published = read_published(run_dir)
        """Newest version that any learner of this run published."""
        self._run, self._epoch, self._keep = run, epoch, keep
        self._dtype, self._url = dtype, url
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            # Of this user alone, whatever another user has put at this name: `mkdir` follows no link.
            self.folder.mkdir(mode=0o700)
        except FileExistsError:
            raise taken(self.folder) from None
        self.seconds = 0.0
        self._tidying: threading.Thread | None = None
        self._next_version_due = threading.Event()
        # Invariant: the tidying thread writes `_preallocated`; others read it after joining that thread.
        self._preallocated: PreallocatedFile | None = None
        self._note_writer = ThreadPoolExecutor(1, "published")

    def publish(
        self,
        version: int,
        shapes: Shapes,
        tensors: Iterable[tuple[str, memoryview]],
        *,
        line: Sequence[tuple[int, int]] = (),
    ) -> PublishWeights:
        """Write ``version`` and return its announcement.

        Args:
            version: number of the version.
            shapes: dtype and shape of each tensor by name.
            tensors: names and bytes; each memoryview is valid until the next.
            line: forks of the line of weights that led to this version.
        """
        started = time.perf_counter()
        if self._dtype == "bfloat16":
            shapes, tensors = rounded_shapes(shapes), rounded(shapes, tensors)
        self.published = PublishedVersion(version, tuple(line))
        noted = self._note_writer.submit(write_published, self._run_dir, self.published)
        preallocated = self._take_preallocated()
        try:
            manifest = write_version(
                self.folder,
                run=self._run,
                epoch=self._epoch,
                version=version,
                shapes=shapes,
                tensors=tensors,
                preallocated=preallocated,
            )
        finally:
            # The number must be on disk before anybody hears of this version: see `write_published`.
            noted.result()
        self.seconds = time.perf_counter() - started
        read = read_manifest(manifest)
        self._next_version_due.clear()
        self._tidying = threading.Thread(
            target=self._tidy, args=(read.nbytes, preallocated), name="tidying", daemon=True
        )
        self._tidying.start()
        return PublishWeights(
            epoch=self._epoch,
            version=version,
            manifest=str(manifest),
            url=self._url,
            root=read.root,
            line=list(line),
        )

    def _tidy(self, nbytes: int, filled: PreallocatedFile | None) -> None:
        """Delete old versions, wait until generators have loaded this one, and allocate memory for the next.

        This runs in a thread of its own, because deleting and allocating each take about as long as writing a
        version. If the next version comes before the allocation begins, it allocates its own memory.
        ``filled`` is an argument so that its memory is unmapped when this thread ends, which takes time too.
        """
        retire(self.folder, self._keep)
        if self._next_version_due.wait(nbytes / GENERATORS_BYTES_PER_S):
            return
        try:
            preallocated = PreallocatedFile(self.folder, nbytes)
        except OSError as error:
            # If there is still no room, the next publication reports it.
            log.debug("no room ahead for the next version: %s", error)
            return
        preallocated.touch()
        self._preallocated = preallocated

    def _take_preallocated(self) -> PreallocatedFile | None:
        self._next_version_due.set()
        self.tidied()
        preallocated, self._preallocated = self._preallocated, None
        return preallocated

    def tidied(self) -> None:
        """Wait until the thread that deletes old versions and allocates memory has ended."""
        if self._tidying is not None:
            self._tidying.join()

    def close(self) -> None:
        """Free the shared memory, unless a later learner of this run uses it."""
        if (preallocated := self._take_preallocated()) is not None:
            preallocated.discard()
        self._note_writer.shutdown()
        if newest_epoch(self._run_dir) <= self._epoch:
            shutil.rmtree(self.folder, ignore_errors=True)


def rounded_shapes(shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the shapes with dtype bfloat16 in place of float32.

    Example:
        >>> rounded_shapes({"a": ("F32", (2,)), "b": ("I64", (1,))})
        {'a': ('BF16', (2,)), 'b': ('I64', (1,))}
    """
    return {name: ("BF16" if dtype == "F32" else dtype, shape) for name, (dtype, shape) in shapes.items()}


def rounded(shapes: Shapes, tensors: Iterable[tuple[str, memoryview]]) -> Iterator[tuple[str, memoryview]]:
    """Yield the tensors, float32 rounded to bfloat16; each memoryview is valid until the next."""
    import torch

    for name, data in tensors:
        if shapes[name][0] != "F32" or not data.nbytes:
            yield name, data
            continue
        exact = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.float32)
        yield name, exact.to(torch.bfloat16).view(torch.uint8).numpy().data
