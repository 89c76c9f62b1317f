"""Weight updates of a generator: chooses the version to load next, verifies it, and takes it into the engine."""

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.errors import EngineFailed, UpdateRefused
from actors.generator.engine import SamplingEngine
from actors.generator.weights.cache import Cache
from protocol.errors import WeightsError
from protocol.files import HeldFolder, remove_left_behind
from protocol.weights.files import untouched, verify_bytes, verify_header
from protocol.weights.format import (
    DATA,
    Manifest,
    Shapes,
    host_id,
    read_manifest,
    verify_adapter,
    verify_shapes,
)

log = logging.getLogger(__name__)


TensorRow = list[Any]
"""Row of one tensor: name, dtype, shape, offset, nbytes. It is a list, as the engine's messages decode it."""

STAGE_PREFIX = "offbeat-stage-"
"""Prefix of the name of a generator's folder in shared memory, which holds the version that it loads."""
FLOATS = ("F32", "BF16", "F16")
FILE_FORMAT = "offbeat-file-1"


@dataclass(frozen=True, order=True)
class Announced:
    """A published version, the path of its manifest on the learner's host, and URLs of hosts that serve it.

    Announcements are ordered by epoch, then version. ``root`` is the announced root hash; it may be "".
    """

    epoch: int
    version: int
    manifest: str = ""
    sources: tuple[str, ...] = field(default=(), compare=False)
    root: str = field(default="", compare=False)
    ordered: bool = field(default=False, compare=False)
    """Whether the sources are to be asked in their order."""


SHARE = 0.25
"""Weight of the newest interval between two versions in their mean."""


@dataclass
class VersionPace:
    """Compares how long a version takes to come with how often one is published.

    Example:
        >>> pace = VersionPace()
        >>> for version, now in ((1, 0.0), (2, 1.0), (5, 4.0)):
        ...     pace.announced(0, version, now)
        >>> pace.fetched(3_500_000, seconds=14.0); pace.sentence()[:73]
        'a version takes 14 s at 0.25 MB/s, and one is published each 1.0 s: take '
        >>> pace.fetched(3_500_000, seconds=0.5); pace.sentence()
        ''
    """

    every_s: float = 0.0
    """Mean time between two versions, in seconds; 0 if it is not known."""
    seconds: float = 0.0
    """Time that the last version took to come; 0 if none was fetched."""
    nbytes: int = 0
    """Bytes that came for it."""
    _last: tuple[int, int, float] | None = None
    """Epoch, number and time of the newest announcement."""

    def announced(self, epoch: int, version: int, now: float) -> None:
        """Note an announcement. It may be repeated, and versions between two may not have been announced here."""
        if self._last is not None:
            last_epoch, last_version, at = self._last
            if (epoch, version) <= (last_epoch, last_version):
                return
            if epoch == last_epoch:
                each_s = (now - at) / (version - last_version)
                self.every_s = each_s if not self.every_s else (1 - SHARE) * self.every_s + SHARE * each_s
        self._last = (epoch, version, now)

    def fetched(self, nbytes: int, seconds: float) -> None:
        """Note a version that came over the network.

        Args:
            nbytes: bytes that had to come; 0 if another process of this host has fetched it.
            seconds: from the request to the last byte.
        """
        if nbytes and seconds > 0:
            self.nbytes, self.seconds = nbytes, seconds

    def sentence(self) -> str:
        """Return why this host falls behind, with the cure; "" if it does not."""
        if not self.every_s or self.seconds <= self.every_s:
            return ""
        rate = self.nbytes / self.seconds / 1e6
        return (
            f"a version takes {self.seconds:.2g} s at {rate:.2g} MB/s, and one is published each {self.every_s:.1f} s: "
            "take a faster line to the learner's host, publish less often (learner.publish_every), or smaller versions "
            '(learner.publish_dtype = "bfloat16")'
        )


class NewestWins:
    """Queue of announced versions with one place: a newer version replaces the one that waits.

    The model folder counts as epoch -1, version 0, so that any published version is newer.

    Example:
        >>> queue = NewestWins()
        >>> queue.offer(Announced(0, 4)), queue.offer(Announced(0, 6)), queue.offer(Announced(0, 5))
        (True, True, False)
        >>> queue.take().version
        6
        >>> queue.finish(Announced(0, 6), applied=True)
        >>> queue.offer(Announced(0, 6))
        False
    """

    def __init__(self) -> None:
        self.in_service = Announced(-1, 0)
        self.skipped = 0
        self._next: Announced | None = None
        self._taken: Announced | None = None
        self._never = (-1, -1)

    def offer(self, announced: Announced) -> bool:
        """Queue a version. Return False if it is not newer than the newest one known, or `never` named it."""
        newest = self._next or self._taken or self.in_service
        place = (announced.epoch, announced.version)
        if place <= (newest.epoch, newest.version) or place == self._never:
            return False
        self.skipped += self._next is not None
        self._next = announced
        return True

    def take(self) -> Announced | None:
        """Return the waiting version, if any, and remove it. It counts as being loaded until `finish`."""
        self._taken, self._next = self._next, None
        return self._taken

    def never(self, announced: Announced) -> None:
        """Refuse this version from now on, because the engine cannot take it."""
        self._never = (announced.epoch, announced.version)

    def finish(self, announced: Announced, *, applied: bool) -> None:
        """Record whether the version taken is in service now. If not, it may be announced again."""
        self._taken = None
        if applied:
            self.in_service = announced


MAX_KNOWN = 64
"""Announced versions that a generator which only evaluates remembers, the newest ones."""


def evaluates_here(evaluators: int, name: str) -> bool:
    """Return whether the generator of this name only evaluates: it is one of the first ones of its run.

    Example:
        >>> evaluates_here(1, "generator-0"), evaluates_here(1, "generator-1"), evaluates_here(0, "generator-0")
        (True, False, False)
    """
    number = name.removeprefix("generator-")
    return number.isdecimal() and int(number) < evaluators


class PinnedVersions:
    """Versions that a generator which only evaluates may load: those that held requests ask for, and no others.

    All requests of an evaluation ask for one version. So the generator keeps it until the first request of the next
    evaluation, however many versions are published meanwhile.

    Example:
        >>> pinned = PinnedVersions()
        >>> for version in (3, 4, 5):
        ...     pinned.announced(Announced(0, version))
        >>> pinned.wanted(None, in_service=2), pinned.wanted(4, in_service=2).version, pinned.wanted(4, in_service=4)
        (None, 4, None)
        >>> pinned.wanted(2, in_service=1).version, pinned.wanted(6, in_service=4)
        (3, None)
    """

    def __init__(self) -> None:
        self._known: dict[int, Announced] = {}

    def announced(self, announced: Announced) -> None:
        """Remember a version. A version that a later epoch numbers again replaces it."""
        self._known[announced.version] = announced
        for version in sorted(self._known)[:-MAX_KNOWN]:
            del self._known[version]

    def wanted(self, lowest: int | None, *, in_service: int) -> Announced | None:
        """Return the version to load, if any.

        Args:
            lowest: earliest version that a held request waits for; None: none is held.
            in_service: version in service.

        Returns:
            That version, or the next later one that is known: a generator that was started again has missed earlier
            announcements. The learner then sees that the version is another one.
        """
        if lowest is None or lowest <= in_service:
            return None
        return next((self._known[v] for v in sorted(self._known) if v >= lowest), None)


class Stage:
    """Folder on tmpfs that holds a version's file from its announcement until it is loaded.

    Args:
        name: name of run and generator. Folders that killed processes of this name have left are removed.
        expected: ``name -> (dtype, shape)`` of the model folder's tensors. Names and shapes must match. The
            learner may publish a float type that differs from the folder's, but the same in all versions.
        adapters: largest rank of versions that are adapters; 0: versions have all tensors expected.
        root: folder in which the stage makes its own. None means shared memory.
        cache: cache of this host, for versions of a learner on a different host. The stage closes it.
        pace: is told how long versions take to come.
    """

    def __init__(
        self,
        name: str,
        expected: Shapes,
        root: Path | None = None,
        cache: Cache | None = None,
        pace: VersionPace | None = None,
        *,
        adapters: int = 0,
    ) -> None:
        self._adapters = adapters
        root = root or shared_memory()
        self._cache = cache
        prefix = f"{STAGE_PREFIX}{name}-"
        remove_left_behind(root, prefix)
        self._held = HeldFolder(root, prefix)
        self.folder = self._held.path
        self._expected = dict(expected)
        self._dtypes_settled = False
        # Invariant: one thread at a time fetches, and the event loop reads what it noted after it has ended.
        self._pace = pace or VersionPace()

    def stage(self, announced: Announced, run: str) -> tuple[Manifest, Path]:
        """Fetch and verify a version. Return its manifest, and the path of its data file in this stage.

        Call it in a thread, because it blocks while it fetches or hashes the file.

        Raises:
            WeightsError: the version cannot be had, belongs to a different run, or does not hold exactly the
                tensors expected. The stage then keeps nothing of it.
        """
        source, cached = self._locate(announced)
        manifest = read_manifest(source)
        _check_identity(manifest, announced, run)
        if self._adapters:
            verify_adapter(manifest, self._expected, self._adapters)
        else:
            verify_shapes(manifest, self._wanted(manifest))
        data = self.folder / f"e{manifest.epoch}-v{manifest.version}.safetensors"
        try:
            link_or_copy(source.with_name(DATA), data)
            with open(data, "rb") as file:
                whole = cached or untouched(manifest, file)
                (verify_header if whole else verify_bytes)(manifest, file)
        except OSError as error:
            self.discard(data)
            raise WeightsError(f"version {announced.version}: {error}") from None
        except WeightsError:
            self.discard(data)
            raise
        return manifest, data

    def accepted(self, manifest: Manifest) -> None:
        """Record that a version is in service. Later versions must have its dtypes, unless they are adapters."""
        if self._adapters:
            return
        self._expected = {t.name: (t.dtype, tuple(t.shape)) for t in manifest.tensors}
        self._dtypes_settled = True

    def discard(self, data: Path) -> None:
        data.unlink(missing_ok=True)

    @property
    def complaints(self) -> dict[str, bool]:
        """Sources that failed, by URL, and whether each lied; see `Cache.complaints`."""
        return self._cache.complaints if self._cache is not None else {}

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        self._held.remove()

    def _locate(self, announced: Announced) -> tuple[Path, bool]:
        """Return the path of the version's manifest, and whether that path is in this host's cache."""
        source = Path(announced.manifest)
        folder = source.parent.parent
        if not announced.sources and not folder.exists():
            raise WeightsError(
                f"version {announced.version}: this host has no {folder}, and nobody serves weights; if the learner "
                "runs on a different host, set weights.http in the run file of all roles, for example to 0.0.0.0:5757, "
                "start `offbeat weights RUN_FILE` beside the learner, and start the learner again with --resume"
            )
        if not announced.sources or self._cache is None or _is_of_this_host(source):
            return source, False
        began, before = time.monotonic(), self._cache.fetched_bytes
        found = self._cache.obtain(
            announced.epoch,
            announced.version,
            announced.sources,
            root=announced.root,
            ordered=announced.ordered,
        )
        self._pace.fetched(self._cache.fetched_bytes - before, time.monotonic() - began)
        return found, True

    def _wanted(self, manifest: Manifest) -> Shapes:
        if self._dtypes_settled:
            return self._expected
        floats = {t.name: t.dtype for t in manifest.tensors if t.dtype in FLOATS}
        return {
            name: (floats.get(name, dtype) if dtype in FLOATS else dtype, shape)
            for name, (dtype, shape) in self._expected.items()
        }


def shared_memory() -> Path:
    """Return a folder in memory, which a reboot clears, or else the folder for temporary files."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def _is_of_this_host(manifest: Path) -> bool:
    """Return whether the learner wrote the manifest on this host. Its path may also exist on other hosts."""
    try:
        return read_manifest(manifest).host == host_id()
    except WeightsError:
        return False


def _check_identity(manifest: Manifest, announced: Announced, run: str) -> None:
    if (manifest.epoch, manifest.version) != (announced.epoch, announced.version):
        raise WeightsError(
            f"{announced.manifest}: holds epoch {manifest.epoch} version {manifest.version}, "
            f"announced were epoch {announced.epoch} version {announced.version}"
        )
    if announced.root and manifest.root != announced.root:
        raise WeightsError(
            f"version {announced.version}: root hash {manifest.root[:12]}..., announced was {announced.root[:12]}...; "
            "these are not the weights that the learner published"
        )
    if manifest.run != run:
        raise WeightsError(f"{announced.manifest}: belongs to run {manifest.run!r}, this is {run!r}")


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` a hard link to ``source`` where the file system allows it, else a copy."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError as error:
        # The target is on a different file system, or links are not allowed there.
        log.debug("copying %s, as it cannot be linked: %s", source, error)
        shutil.copyfile(source, target)


def tensor_table(manifest: Manifest) -> list[TensorRow]:
    """Return rows of (name, dtype, shape, offset, nbytes), so that a worker finds the tensors in the file."""
    return [[t.name, t.dtype, list(t.shape), t.offset, t.nbytes] for t in manifest.tensors]


def shares(rows: list[TensorRow], count: int, *, together: int | None) -> list[list[TensorRow]]:
    """Split the rows of `tensor_table` into ``count`` lists with about the same number of bytes.

    Args:
        together: tensors whose first dimension is this stay in one list.

    Example:
        >>> a, b, c = ["a", "F32", [2], 0, 8], ["b", "F32", [1], 8, 4], ["c", "F32", [2], 12, 8]
        >>> [[name for name, *_ in share] for share in shares([a, b, c], 2, together=None)]
        [['a', 'b'], ['c']]
        >>> [[name for name, *_ in share] for share in shares([a, b, c], 2, together=2)]
        [['a', 'c'], ['b']]
    """
    if count == 1:
        return [rows]
    units: dict[object, list[TensorRow]] = {}
    for row in rows:
        name, _, shape, _, _ = row
        units.setdefault(together if shape and shape[0] == together else name, []).append(row)
    found: list[list[TensorRow]] = [[] for _ in range(count)]
    taken = [0] * count
    sizes = {key: sum(row[-1] for row in unit) for key, unit in units.items()}
    for key in sorted(units, key=lambda key: -sizes[key]):
        least = taken.index(min(taken))
        found[least] += units[key]
        taken[least] += sizes[key]
    return found


ADAPTER, ADAPTER_NUMBER = "policy", 1
"""Name and number that vLLM knows the adapter by, of which all versions take turns."""
STAGE_TIMEOUT_S = 3600.0
LOAD_BYTES_PER_S = 50e6
"""Slowest pace of a load, slower than any memory. `load_deadline` adds the time of the bytes at this pace."""


def load_deadline(nbytes: int, *, patience_s: float, longest_s: float) -> float:
    """Return the seconds that loading a version of ``nbytes`` may take.

    Example:
        >>> load_deadline(100_000_000, patience_s=8.0, longest_s=300.0)
        10.0
    """
    return min(longest_s, patience_s + nbytes / LOAD_BYTES_PER_S)


class WeightUpdater:
    """Applies one update at a time, always the newest announced version.

    A version that fails its verification is counted, logged and skipped, and the engine stays unchanged.
    After a load that fails or takes too long, nobody may sample from the engine, so ``on_failure`` ends this
    process. The deadline of a load depends on its size, so that an engine that hangs in a load is found
    nearly as soon as one that hangs while it samples.

    Args:
        on_failure: called with the reason when this process has to end.
        patience_s: longest time for a load of zero bytes.
        longest_s: longest time for a load of any size.
        pace: knows how long versions take to come, and is told how often they are announced.
    """

    def __init__(
        self,
        engine: SamplingEngine,
        queue: NewestWins,
        stage: Stage,
        run: str,
        *,
        on_failure: Callable[[str], None],
        patience_s: float = 8.0,
        longest_s: float = 300.0,
        pace: VersionPace | None = None,
    ) -> None:
        self._pace = pace or VersionPace()
        self.loading = False
        self.note = ""
        """Why the newest announced version is not in service, with the cure; "" if nothing is known to hinder it."""
        self._engine, self._queue, self._stage, self._run = engine, queue, stage, run
        self._on_failure = on_failure
        self._patience_s, self._longest_s = patience_s, longest_s
        self._offered = asyncio.Event()
        self._applied = 0
        self._refused = 0
        self._pause_s = 0.0

    def offer(self, announced: Announced) -> None:
        """Take an announcement of the broker, which repeats it until the version is in service."""
        self._pace.announced(announced.epoch, announced.version, time.monotonic())
        if self._queue.offer(announced):
            self._offered.set()
        elif announced < self._queue.in_service:
            in_service = self._queue.in_service
            self._refuse(
                f"epoch {announced.epoch} version {announced.version} is behind what is in service, "
                f"epoch {in_service.epoch} version {in_service.version}"
            )

    async def run(self, on_applied: Callable[[], None]) -> None:
        """Apply updates until cancelled."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            while announced := self._queue.take():
                applied = await self.update(announced)
                self._queue.finish(announced, applied=applied)
                if applied:
                    on_applied()

    async def update(self, announced: Announced) -> bool:
        """Stage, verify and load one version. Return True if it is in service now."""
        try:
            async with asyncio.timeout(STAGE_TIMEOUT_S):
                manifest, data = await asyncio.to_thread(self._stage.stage, announced, self._run)
        except TimeoutError:
            # The thread cannot be ended, so this process has to end.
            self._on_failure(
                f"fetching and verifying version {announced.version} took longer than {STAGE_TIMEOUT_S:g} s; is "
                f"{announced.manifest} on a file system that hangs?"
            )
            return False
        except WeightsError as error:
            self._refuse(str(error))
            self.note = f"new weights do not arrive: {error}"
            return False
        allowed_s = load_deadline(manifest.nbytes, patience_s=self._patience_s, longest_s=self._longest_s)
        self.loading = True
        try:
            # An engine may have to wait for the learner before it wakes, which is no time of the load.
            async with self._engine.awake(), asyncio.timeout(allowed_s):
                self._pause_s = await self._engine.apply_weights(manifest, data)
        except UpdateRefused as error:
            self._queue.never(announced)
            self._refuse(str(error))
            self.note = f"the engine takes no new weights: {error}"
            return False
        except (EngineFailed, TimeoutError) as error:
            why = str(error) or f"it took longer than {allowed_s:.1f} s"
            self._on_failure(f"loading version {announced.version} failed, the engine is lost: {why}")
            return False
        finally:
            self.loading = False
            self._stage.discard(data)
        self._stage.accepted(manifest)
        self._applied += 1
        self.note = self._pace.sentence()
        log.info("policy version %d in service, paused for %.0f ms", manifest.version, 1e3 * self._pause_s)
        return True

    def gauges(self) -> dict[str, float]:
        return {
            "update_pause_seconds": self._pause_s,
            "updates_applied_total": float(self._applied),
            "updates_refused_total": float(self._refused),
            "updates_skipped_total": float(self._queue.skipped),
        }

    def _refuse(self, why: str) -> None:
        self._refused += 1
        log.warning("weight update refused, sampling goes on as before: %s", why)
