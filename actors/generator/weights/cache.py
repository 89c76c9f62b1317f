"""Versions that this host has fetched: once, however many generators it has, into shared memory.

A version lies in a folder of its own that appears by a rename when all of it has been verified; generators link the
file. One process fetches at a time, the others wait for it, by a file lock, which ends with its holder. What a killed
process has fetched of a version stays, is verified again, and is gone on with.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from actors.errors import Cancelled, NoRoom, SourceFailed, WrongBytes
from actors.generator.weights.fetch import fetch, reserve
from actors.generator.weights.source import Source
from protocol.errors import KeysUnusable, WeightsError
from protocol.security.http_tls import Access
from protocol.weights.chunks import digest
from protocol.weights.delta import apply_delta
from protocol.weights.files import verify_bytes, verify_header
from protocol.weights.format import DATA, MANIFEST, Base, Manifest, read_manifest, same_layout

log = logging.getLogger(__name__)

CACHE_PREFIX = "offbeat-cache-"
"""Begins the name of a host's cache in shared memory. Its users hold a lock inside and sweep it themselves."""
KEEP = 2
TURN_S = 900.0
"""Longest wait for another process of this host that is fetching."""
POLL_S = 0.05
ABANDONED_S = 600.0
"""A cache that nobody has open may go after so long without a change: its processes may be about to start again."""
FETCH, USERS, PARTIAL, DELTA = "fetch.lock", "users.lock", ".partial", "delta-"
COMPLETE = re.compile(r"e(\d+)-v(\d+)")


class Cache:
    """The versions of one run on this host.

    Args:
        folder: the same for all processes of the host that belong to the run; see `cache_folder`.
        access: token and certificate of the run, asked for anew for each transfer.
    """

    def __init__(self, folder: Path, run: str, access: Callable[[], Access] = Access) -> None:
        self.folder, self.fetched_bytes = folder, 0
        self._run, self._access = run, access
        self._cancelled = threading.Event()
        self._users: IO[bytes] | None = None
        _sweep(folder.parent, but=folder)

    def locate(self, epoch: int, version: int) -> Path:
        """Folder of a version; it exists only if the version is here and whole."""
        return self.folder / f"e{epoch:08d}-v{version:08d}"

    def obtain(self, epoch: int, version: int, sources: Sequence[str], root: str = "") -> Path:
        """Path of the manifest of a version that lies here verified; fetches it if nobody has yet. Blocks.

        Args:
            sources: base URLs, tried in random order, but the last one last.
            root: root hash that was announced; empty: the first source that answers is believed.

        Raises:
            WeightsError: no source gave it; the text names each with the reason.
        """
        tried = []
        for url in in_order(sources):
            try:
                self._enter()
                return self._obtain_from(url, epoch, version, root)
            except SourceFailed as error:
                log.warning("version %d could not be fetched from %s: %s", version, url, error)
                tried.append(f"{url} {error}")
            except Cancelled:
                raise WeightsError(f"version {version}: this process ends") from None
            except OSError as error:
                raise WeightsError(f"version {version}: {error}") from None
        raise WeightsError(
            f"version {version} could not be had from any source: {'; '.join(tried) or 'none given'}"
        )

    def close(self) -> None:
        """End what is being fetched; the last process of the host removes everything."""
        self._cancelled.set()
        if self._users is None:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.folder, ignore_errors=True)
        self._users.close()
        self._users = None

    def _obtain_from(self, url: str, epoch: int, version: int, root: str) -> Path:
        source = self._connect(url)
        try:
            base = self._newest()
            for told_by in dict.fromkeys((base, None)):
                manifest = source.manifest(epoch, version, told_by)
                self._check(manifest, epoch, version, root)
                try:
                    return self._complete(url, manifest, told_by)
                except _DeltaUseless as error:
                    log.warning("version %d: %s; fetching it whole", version, error)
        finally:
            source.close()
        raise SourceFailed("sends a delta where the whole version was asked for")

    def _connect(self, url: str) -> Source:
        try:
            return Source(url, self._access(), self._cancelled)
        except KeysUnusable as error:
            raise SourceFailed(f"cannot be asked: {error}") from None

    def _check(self, manifest: Manifest, epoch: int, version: int, root: str) -> None:
        if (manifest.epoch, manifest.version) != (epoch, version):
            raise WrongBytes(
                f"sends epoch {manifest.epoch} version {manifest.version}, asked for epoch {epoch} version {version}"
            )
        if manifest.run != self._run:
            raise WrongBytes(f"serves run {manifest.run!r}, this is {self._run!r}")
        if root and manifest.root != root:
            raise WrongBytes(f"sends a version with root {manifest.root}, announced was {root}")

    def _complete(self, url: str, manifest: Manifest, told_by: Base | None) -> Path:
        """Have the version of this manifest, from this source unless it is here."""
        folder = self.locate(manifest.epoch, manifest.version)
        with self._turn():
            if (folder / MANIFEST).exists():
                if read_manifest(folder / MANIFEST).root == manifest.root:
                    return folder / MANIFEST
                shutil.rmtree(folder)  # of another run with our name
            partial = folder.with_name(f"{folder.name}-{manifest.root[:16]}{PARTIAL}")
            for left in self.folder.glob(f"*{PARTIAL}"):
                if left != partial:
                    shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(mode=0o700, exist_ok=True)
            whole = self._fill(url, manifest, told_by, partial)
            (partial / MANIFEST).write_bytes(msgspec.msgpack.encode(whole))
            partial.rename(folder)
            self._trim()
        return folder / MANIFEST

    def _fill(self, url: str, manifest: Manifest, told_by: Base | None, partial: Path) -> Manifest:
        """Fetch into a folder; returns the manifest of what then lies there whole."""
        data = partial / DATA
        if manifest.encoding == "full":
            also = [(folder / DATA, read_manifest(folder / MANIFEST)) for folder in self._held()[:1]]
            try:
                self.fetched_bytes += fetch(lambda: self._connect(url), manifest, data, self._cancelled, also)
                with open(data, "rb") as file:
                    verify_header(manifest, file)  # each chunk was verified when it came
            except WeightsError as error:
                shutil.rmtree(partial, ignore_errors=True)
                if isinstance(error, NoRoom):
                    raise
                raise WrongBytes(str(error)) from None
            return manifest
        if manifest.base != told_by:
            raise WrongBytes(f"sends a delta from {manifest.base}, asked for one from {told_by}")
        delta = partial / f"{DELTA}{digest(manifest.delta_chunks).hex()[:16]}"
        try:
            self.fetched_bytes += fetch(lambda: self._connect(url), manifest, delta, self._cancelled)
            self._apply(manifest, delta, data)
        except (WrongBytes, WeightsError) as error:
            data.unlink(missing_ok=True)
            delta.unlink(missing_ok=True)
            raise _DeltaUseless(f"the delta from {url} is of no use: {error}") from None
        delta.unlink()
        return msgspec.structs.replace(manifest, encoding="full", base=None, delta_bytes=0, delta_chunks=b"")

    def _apply(self, manifest: Manifest, delta: Path, data: Path) -> None:
        """Make the data file out of its base and a delta, and see whether it is what it should be."""
        base = manifest.base
        assert base is not None
        folder = self.locate(base.epoch, base.version)
        known = read_manifest(folder / MANIFEST)
        if known.root != base.root or not same_layout(known.tensors, manifest.tensors):
            raise WeightsError(f"version {base.version} here is not its base")
        data.unlink(missing_ok=True)
        with open(delta, "rb") as told, open(folder / DATA, "rb") as old, open(data, "xb") as new:
            reserve(new.fileno(), manifest.nbytes, data)
            apply_delta(told.fileno(), old.fileno(), new.fileno(), manifest.nbytes)
        with open(data, "rb") as made:
            verify_bytes(manifest, made)

    def _held(self) -> list[Path]:
        """Whole versions here, the newest first."""
        found = [
            (int(match[1]), int(match[2]), path)
            for path in self.folder.iterdir()
            if (match := COMPLETE.fullmatch(path.name))
        ]
        return [path for _, _, path in sorted(found, reverse=True)]

    def _newest(self) -> Base | None:
        for folder in self._held():
            with contextlib.suppress(WeightsError):  # being removed
                return read_manifest(folder / MANIFEST).as_base
        return None

    def _trim(self) -> None:
        for folder in self._held()[KEEP:]:
            _remove(folder)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One process of this host at a time."""
        with open(self.folder / FETCH, "ab") as lock:
            deadline = time.monotonic() + TURN_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise WeightsError(
                            f"another process of this host has been fetching into {self.folder} for more than "
                            f"{TURN_S:g} s; is it stopped?"
                        ) from None
                    if self._cancelled.wait(POLL_S):
                        raise Cancelled from None
            yield

    def _enter(self) -> None:
        """Be among those who have the cache open; what nobody has is removed."""
        if self._users is not None and _is_at(self._users, self.folder / USERS):
            return
        while True:
            self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            if self.folder.is_symlink() or self.folder.lstat().st_uid != os.geteuid():
                raise WeightsError(f"{self.folder} belongs to another user; remove it")
            with contextlib.suppress(FileNotFoundError, BlockingIOError):  # its last user is removing it
                self._users = open(self.folder / USERS, "ab")  # noqa: SIM115 (held as long as we use it)
                fcntl.flock(self._users, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if _is_at(self._users, self.folder / USERS):
                    return
            if self._cancelled.wait(POLL_S):
                raise Cancelled


class _DeltaUseless(Exception):
    """The whole version has to be fetched."""


def in_order(sources: Sequence[str]) -> list[str]:
    """Relays in a random order, so that hosts do not all ask the same one; the last source, the learner, last.

    Example:
        >>> in_order(["http://learner"]), in_order([])
        (['http://learner'], [])
    """
    *relays, last = sources or ("",)
    return [*random.sample(relays, len(relays)), *([last] if last else [])]


def cache_folder(root: Path, run: str, broker: str) -> Path:
    """Where the processes of this host that belong to a run meet.

    Args:
        broker: its endpoint, which tells runs of the same name apart.
    """
    digest = hashlib.sha256(f"{broker} {os.geteuid()}".encode()).hexdigest()[:12]
    return root / f"{CACHE_PREFIX}{run}-{digest}"


def _remove(folder: Path) -> None:
    """By a rename first, so that nobody sees half of it; the memory is given back while we go on."""
    gone = folder.with_name(f"{folder.name}{PARTIAL}")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rename(gone)
    threading.Thread(target=shutil.rmtree, args=(gone, True), name="weights removal", daemon=True).start()


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _sweep(root: Path, *, but: Path) -> None:
    """Remove caches that nobody has open, nor has had for a while."""
    for folder in root.glob(f"{CACHE_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder == but or folder.is_symlink() or time.time() - folder.stat().st_mtime < ABANDONED_S:
                continue
            with open(folder / USERS, "ab") as users:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
