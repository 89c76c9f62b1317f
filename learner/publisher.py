"""New policy versions out: written whole into shared memory, then announced through the broker."""

import logging
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from learner.run_files import PublishedVersion, newest_epoch, read_published, weights_folder, write_published
from protocol.messages import PublishWeights
from protocol.weights.files import write_version
from protocol.weights.format import Shapes, read_manifest, retire
from protocol.weights.preallocated import Blank

log = logging.getLogger(__name__)

GENERATORS_BYTES_PER_S = 500e6
"""About: what generators of this host verify and load in a second, with all its cores."""


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
        self._tidying: threading.Thread | None = None
        self._hurry = threading.Event()
        self._blank: Blank | None = None
        self._aside = ThreadPoolExecutor(1, "published")

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
        self.published = PublishedVersion(version, tuple(line))
        noted = self._aside.submit(write_published, self._run_dir, self.published)
        blank = self._take_blank()
        try:
            manifest = write_version(
                self.folder,
                run=self._run,
                epoch=self._epoch,
                version=version,
                shapes=shapes,
                tensors=tensors,
                blank=blank,
            )
        finally:
            noted.result()  # nobody hears of this version before it is on the disk that there was one
        self.seconds = time.perf_counter() - started
        read = read_manifest(manifest)
        self._hurry.clear()
        self._tidying = threading.Thread(
            target=self._tidy, args=(read.nbytes, blank), name="tidying", daemon=True
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

    def _tidy(self, nbytes: int, filled: Blank | None) -> None:
        """Delete what is old, and make room for the next version once generators have this one, while we go on.

        Each takes about as long as to write a version. If the next one comes before room is begun, it makes its own.
        ``filled`` is unmapped with the end of this thread, for the same reason.
        """
        retire(self.folder, self._keep)
        if self._hurry.wait(nbytes / GENERATORS_BYTES_PER_S):
            return
        try:
            blank = Blank(self.folder, nbytes)
        except OSError as error:  # the next publication will say so, if it still is so
            log.debug("no room ahead for the next version: %s", error)
            return
        blank.touch()
        self._blank = blank

    def _take_blank(self) -> Blank | None:
        self._hurry.set()
        self.tidied()
        blank, self._blank = self._blank, None
        return blank

    def tidied(self) -> None:
        """Wait until what is old is deleted and there is room for the next version, unless that is wanted at once."""
        if self._tidying is not None:
            self._tidying.join()

    def close(self) -> None:
        """Free the shared memory, unless a later learner of this run has it."""
        if (blank := self._take_blank()) is not None:
            blank.discard()
        self._aside.shutdown()
        if newest_epoch(self._run_dir) <= self._epoch:
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
