"""Weight updates of a generator: which version comes next, and proof that it is whole before it is loaded.

Files are staged while sampling goes on: linked (or copied) into a folder of the generator's own, so that the
publisher may retire a version at any time. The learner's own file, as it was left, needs no other proof; any other is
verified byte by byte. On another host than the learner's they come from the host's cache,
`actors.generator.weights.cache`, which holds only what it has verified.
"""

import logging
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.generator.weights.cache import Cache
from protocol.errors import WeightsError
from protocol.weights.files import untouched, verify_bytes, verify_header
from protocol.weights.format import DATA, Manifest, Shapes, host_id, read_manifest, verify_shapes

log = logging.getLogger(__name__)


TensorRow = list[Any]
"""Of a tensor: name, dtype, shape, offset, nbytes. A list, as it comes out of the engine's messages as one."""

STAGE_PREFIX = "offbeat-stage-"
"""Begins the name of a generator's folder in shared memory, where it keeps the version that it loads."""
FLOATS = ("F32", "BF16", "F16")
FILE_FORMAT = "offbeat-file-1"


@dataclass(frozen=True, order=True)
class Announced:
    """A published version, the path of its manifest on the learner's host, and URLs of hosts that serve it.

    Ordered by epoch, then version.
    """

    epoch: int
    version: int
    manifest: str = ""
    sources: tuple[str, ...] = field(default=(), compare=False)
    root: str = field(default="", compare=False)


class NewestWins:
    """Queue of announced versions with one place: what is older than the newest is skipped.

    The model folder counts as epoch -1, version 0, so that any publication is newer.

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
        """Note an announcement; False when it is not newer than what is in service, being loaded or waiting."""
        newest = self._next or self._taken or self.in_service
        place = (announced.epoch, announced.version)
        if place <= (newest.epoch, newest.version) or place == self._never:
            return False
        self.skipped += self._next is not None
        self._next = announced
        return True

    def take(self) -> Announced | None:
        """The newest announced version, once; it counts as being loaded until `settle`."""
        self._taken, self._next = self._next, None
        return self._taken

    def never(self, announced: Announced) -> None:
        """The engine cannot take this version: it is in vain to announce it again."""
        self._never = (announced.epoch, announced.version)

    def finish(self, announced: Announced, *, applied: bool) -> None:
        """What became of a version taken; one that was refused may be announced again."""
        self._taken = None
        if applied:
            self.in_service = announced


class Stage:
    """A folder on tmpfs where files lie from their announcement until they are loaded.

    Args:
        name: of run and generator. What killed processes of that name have left is removed.
        expected: ``name -> (dtype, shape)`` of the model folder's tensors. Names and shapes must be met. The
            learner may publish another float type than the folder has, but then all versions must have that.
        cache: of this host, for versions of a learner on another; closed with this stage.
    """

    def __init__(
        self, name: str, expected: Shapes, root: Path | None = None, cache: Cache | None = None
    ) -> None:
        root = root or shared_memory()
        self._cache = cache
        for left in root.glob(f"{STAGE_PREFIX}{name}-*"):
            if not Path("/proc", left.name.rpartition("-")[2]).exists():
                shutil.rmtree(left, ignore_errors=True)
        self.folder = root / f"{STAGE_PREFIX}{name}-{os.getpid()}"
        self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        if self.folder.is_symlink() or self.folder.lstat().st_uid != os.geteuid():
            raise WeightsError(f"{self.folder} belongs to another user; remove it")
        self._expected = dict(expected)
        self._dtypes_settled = False

    def stage(self, announced: Announced, run: str) -> tuple[Manifest, Path]:
        """Fetch and verify a version; returns its manifest and our own name for its data file.

        Blocks for as long as it takes to fetch or hash the file: call it in a thread.

        Raises:
            WeightsError: not to be had, another run's, or not exactly the tensors expected. Nothing is left.
        """
        source, cached = self._locate(announced)
        manifest = read_manifest(source)
        _check_identity(manifest, announced, run)
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
        """This version is in service: later ones must have its dtypes."""
        self._expected = {t.name: (t.dtype, tuple(t.shape)) for t in manifest.tensors}
        self._dtypes_settled = True

    def discard(self, data: Path) -> None:
        data.unlink(missing_ok=True)

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _locate(self, announced: Announced) -> tuple[Path, bool]:
        """Where the version's manifest lies, and whether that is in our cache."""
        source = Path(announced.manifest)
        if not announced.sources or self._cache is None or _is_of_this_host(source):
            return source, False
        found = self._cache.obtain(announced.epoch, announced.version, announced.sources, root=announced.root)
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
    """A folder in memory, which survives no reboot; else one for temporary files."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def _is_of_this_host(manifest: Path) -> bool:
    """Whether the learner wrote it on this machine: the same path may exist on another by accident."""
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
    """Another name for the same bytes where the file system allows it, else a copy."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError as error:  # another file system, or links are forbidden there
        log.debug("copying %s, as it cannot be linked: %s", source, error)
        shutil.copyfile(source, target)


def tensor_table(manifest: Manifest) -> list[TensorRow]:
    """Rows of (name, dtype, shape, offset, nbytes): what a worker needs to find the tensors in the file."""
    return [[t.name, t.dtype, list(t.shape), t.offset, t.nbytes] for t in manifest.tensors]


def shares(rows: list[TensorRow], count: int, *, together: int | None) -> list[list[TensorRow]]:
    """Rows of `tensor_table` in ``count`` lists of about as many bytes.

    Args:
        together: tensors of so many rows stay in one list.

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
