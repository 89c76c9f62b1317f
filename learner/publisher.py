"""Publishes policy versions: copies the weights, and announces them from a thread while training goes on.

Order of events: the learner copies the weights into shared memory and goes on. A thread notes the number, joins
the hashes, writes the manifest, renames the folder, and only then tells the broker. So a version that was copied
and not announced is seen by nobody, and nor is half of a manifest. A version is copied when the version before has
been announced.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from learner.errors import NotAnnounced
from learner.run_files import PublishedVersion, newest_epoch, read_published, weights_folder, write_published
from protocol.files import taken
from protocol.messages.peers import PublishWeights
from protocol.weights.files import NewVersion, PreallocatedFile
from protocol.weights.format import retire

if TYPE_CHECKING:
    from learner.weight_copy import OutgoingWeights


log = logging.getLogger(__name__)

GENERATORS_BYTES_PER_S = 500e6
"""Approximate bytes that the generators of this host verify and load in a second, using all its cores."""
PATIENCE_S = 60.0
"""Seconds that the thread may take for a version of zero bytes."""
SLOWEST_BYTES_PER_S = 50e6
"""Slowest pace of hashing and of freeing memory, slower than any machine that trains."""

Announce = Callable[[PublishWeights], None]
Register = Callable[[memoryview], Callable[[], None]]
"""Prepares memory for copies from a device, and returns the function that ends that."""


@dataclass(frozen=True)
class _Underway:
    """A version that was copied and whose thread has not ended."""

    version: int
    nbytes: int
    announced: "Future[None]"
    thread: threading.Thread

    @property
    def deadline_s(self) -> float:
        """Seconds that others wait for the thread."""
        return PATIENCE_S + self.nbytes / SLOWEST_BYTES_PER_S


class Publisher:
    """Publishes versions and deletes old ones.

    Args:
        epoch: number of this learner process in the run.
        keep: number of versions that stay in the folder.
        url: address from which other hosts can fetch versions; empty: only this host can.
        register: prepares memory for copies from a CUDA device, see `register` in `learner.weight_copy`;
            None: the weights are on the CPU.

    Raises:
        NameTaken: a different user has the name of the folder in shared memory.
    """

    def __init__(
        self,
        run: str,
        run_dir: Path,
        *,
        epoch: int,
        keep: int,
        url: str = "",
        register: Register | None = None,
    ) -> None:
        self.folder = weights_folder(run_dir)
        self._run_dir = run_dir
        # Invariant: the thread of a version writes these four before the version counts as announced.
        self.published = read_published(run_dir)
        """Newest version that any learner of this run published."""
        self.announced = 0
        """Newest version that this process has announced; 0: none."""
        self.announced_s: float | None = None
        """Seconds from the beginning of the newest announced version's publication until it was announced."""
        self.stood_s = 0.0
        """Seconds that the learner stood for the newest version, the wait for the version before included."""
        # Invariant: the learner's thread writes this, and the thread of a version reads it.
        self.pinned: int | None = None
        """Version that stays besides the newest ones, because an evaluation needs it."""
        self._run, self._epoch, self._keep = run, epoch, keep
        self._url, self._register = url, register
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            # Of this user alone, whatever another user has put at this name: `mkdir` follows no link.
            self.folder.mkdir(mode=0o700)
        except FileExistsError:
            raise taken(self.folder) from None
        self._underway: _Underway | None = None
        self._next_version_due, self._stopped = threading.Event(), threading.Event()
        # Invariant: the thread of a version writes `_ahead`; others read it after joining that thread.
        self._ahead: tuple[PreallocatedFile, Callable[[], None]] | None = None

    def publish(
        self,
        version: int,
        weights: "OutgoingWeights",
        *,
        announce: Announce,
        line: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Copy the weights. A thread announces them as ``version`` afterwards; see `settle`.

        Args:
            version: number of the version.
            weights: weights to copy. On a CUDA device they may change once `CopyStream.hold` was called, otherwise
                when this method returns.
            announce: sends the announcement; called in the thread.
            line: forks of the line of weights that led to this version.

        Raises:
            NotAnnounced: the version before did not get announced in time.
            OSError: there is no room for the version; or the error that ended the thread of the version before.
        """
        started = time.perf_counter()
        self.settle()
        ahead, unregister = self._take_ahead()
        new: NewVersion | None = None
        try:
            new = NewVersion(self.folder, weights.shapes, ahead)
            arrived = weights.copy_into(new.memory, new.places, new.written)
        except BaseException:
            unregister()
            if new is not None:
                new.discard()
            raise
        announced: Future[None] = Future()

        def run(new: NewVersion, ahead: PreallocatedFile | None) -> None:
            try:
                self._finish(new, version, arrived, unregister, announce, tuple(line), started)
            except BaseException as error:
                error.add_note(f"while policy version {version} was being published")
                new.discard()
                announced.set_exception(error)
                return
            announced.set_result(None)
            self._tidy(new.nbytes)

        self._next_version_due.clear()
        # The thread gets the filled memory as an argument, so that it is unmapped when the thread ends, which
        # takes time too.
        thread = threading.Thread(target=run, args=(new, ahead), name="publishing", daemon=True)
        self._underway = _Underway(version, new.nbytes, announced, thread)
        thread.start()
        self.stood_s = time.perf_counter() - started

    def _finish(
        self,
        new: NewVersion,
        version: int,
        arrived: Callable[[], None],
        unregister: Callable[[], None],
        announce: Announce,
        line: tuple[tuple[int, int], ...],
        started: float,
    ) -> None:
        """Finish a version whose weights are copied, and announce it. This runs in the thread of the version."""
        published = PublishedVersion(version, line)
        # The number must be on disk before anybody hears of this version: see `write_published`.
        write_published(self._run_dir, published)
        try:
            arrived()
        finally:
            unregister()
        path, manifest = new.finish(run=self._run, epoch=self._epoch, version=version)
        if self._stopped.is_set():
            raise NotAnnounced(f"policy version {version} was not announced, because the learner has ended")
        announce(
            PublishWeights(
                epoch=self._epoch,
                version=version,
                manifest=str(path),
                url=self._url,
                root=manifest.root,
                line=list(line),
            )
        )
        self.published, self.announced = published, version
        self.announced_s = time.perf_counter() - started

    def settle(self) -> None:
        """Wait until the newest version is announced.

        Raises:
            NotAnnounced: that did not happen in time.
            Exception: the error that ended the thread of the version.
        """
        if (underway := self._underway) is None:
            return
        if not wait_for([underway.announced], underway.deadline_s).done:
            raise NotAnnounced(
                f"policy version {underway.version} ({underway.nbytes} bytes) was copied, but not hashed and announced "
                f"within {underway.deadline_s:.0f} s; does the file system of {self._run_dir} or {self.folder} hang?"
            )
        self.check()

    def check(self) -> None:
        """Re-raise an error from the publishing thread."""
        if self._underway is not None and self._underway.announced.done():
            self._underway.announced.result(0)

    def _tidy(self, nbytes: int) -> None:
        """Delete old versions, wait until generators have loaded this one, and allocate memory for the next.

        The thread of the version does this, because deleting and allocating each take about as long as writing a
        version. If the next version comes before the allocation begins, it allocates its own memory.
        """
        retire(self.folder, self._keep, also=self.pinned)
        if self._next_version_due.wait(nbytes / GENERATORS_BYTES_PER_S):
            return
        try:
            preallocated = PreallocatedFile(self.folder, nbytes)
        except OSError as error:
            # If there is still no room, the next publication reports it.
            log.debug("no room ahead for the next version: %s", error)
            return
        preallocated.touch()
        self._ahead = preallocated, (self._register or _unprepared)(preallocated.memory)

    def _take_ahead(self) -> tuple[PreallocatedFile | None, Callable[[], None]]:
        self._next_version_due.set()
        self.await_tidied()
        ahead, self._ahead = self._ahead, None
        return ahead if ahead is not None else (None, _nothing)

    def await_tidied(self) -> None:
        """Wait until the newest version's thread has deleted old versions and allocated memory for the next.

        Raises:
            NotAnnounced: the thread did not end in time.
        """
        if (underway := self._underway) is None:
            return
        underway.thread.join(underway.deadline_s)
        if underway.thread.is_alive():
            raise NotAnnounced(
                f"the thread that published version {underway.version} did not end within {underway.deadline_s:.0f} s; "
                f"does the file system of {self.folder} hang?"
            )

    def stop(self) -> None:
        """Wait until the newest version is announced, before the connection to the broker closes.

        If that fails or takes too long, the log says so, and the version will not be announced. A second call does
        nothing.
        """
        if self._stopped.is_set():
            return
        try:
            self.settle()
        except Exception as error:
            log.warning("the newest version was not announced: %s: %s", type(error).__name__, error)
        self._stopped.set()

    def close(self) -> None:
        """Free the shared memory, unless a later learner of this run uses it."""
        self.stop()
        try:
            ahead, unregister = self._take_ahead()
        except NotAnnounced as error:
            log.warning("%s", error)
        else:
            unregister()
            if ahead is not None:
                ahead.discard()
        if newest_epoch(self._run_dir) <= self._epoch:
            shutil.rmtree(self.folder, ignore_errors=True)


def _unprepared(memory: memoryview) -> Callable[[], None]:
    """Leave the memory as it is, because the weights are on the CPU."""
    return _nothing


def _nothing() -> None:
    """End nothing."""
