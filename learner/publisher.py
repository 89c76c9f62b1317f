"""New policy versions out: written whole into shared memory, then announced through the broker."""

import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from learner.run_files import weights_folder
from protocol.messages import PublishWeights
from protocol.weights import retire, write_version


class Publisher:
    """Writes versions, keeps the newest few, and says what to announce."""

    def __init__(self, run: str, run_dir: Path, *, epoch: int, keep: int) -> None:
        self.folder = weights_folder(run_dir)
        self._run, self._epoch, self._keep = run, epoch, keep
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.seconds = 0.0

    def publish(
        self,
        version: int,
        shapes: Mapping[str, tuple[str, tuple[int, ...]]],
        tensors: Iterable[tuple[str, memoryview]],
    ) -> PublishWeights:
        """Write ``version`` and return its announcement."""
        started = time.perf_counter()
        manifest = write_version(
            self.folder, run=self._run, epoch=self._epoch, version=version, shapes=shapes, tensors=tensors
        )
        retire(self.folder, self._keep)
        self.seconds = time.perf_counter() - started
        return PublishWeights(epoch=self._epoch, version=version, manifest=str(manifest))

    def close(self) -> None:
        """Free the shared memory."""
        shutil.rmtree(self.folder, ignore_errors=True)
