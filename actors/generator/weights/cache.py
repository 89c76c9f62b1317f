"""Cache of weight versions in shared memory: a host fetches each version once for all its generators."""

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
from actors.generator.weights.fetch import Source, fetch, reserve
from protocol.errors import KeysUnusable, WeightsError
from protocol.files import is_at, is_own_folder, locked_file, make_private_folder
from protocol.security.http import Access
from protocol.weights.files import apply_delta, verify_bytes, verify_header
from protocol.weights.format import DATA, MANIFEST, Base, Manifest, read_manifest, same_layout
from protocol.weights.partial import HELD, PARTIAL, transfer_file

log = logging.getLogger(__name__)

CACHE_PREFIX = "offbeat-cache-"
"""Prefix of the name of a cache in shared memory. Its users lock a file in it, and remove it themselves."""
KEEP = 2
"""Versions that the cache keeps."""
TURN_S = 900.0
"""Longest wait for a different process of this host that is fetching."""
POLL_S = 0.05
ABANDONED_S = 600.0
"""Time without a change after which a cache that no process has open is removed. Until then its processes may
be about to start again."""
FETCH, USERS = "fetch.lock", "users.lock"
COMPLETE = re.compile(r"e(\d+)-v(\d+)")


class CacheFolder:
    """Folder that all processes of this host in a run share. Folders that nobody uses are removed at first.

    Args:
        path: see `cache_folder`.
        cancelled: set when this process ends. It ends all waits.
    """

    def __init__(self, path: Path, cancelled: threading.Event) -> None:
        self.path, self._cancelled = path, cancelled
        self._users: IO[bytes] | None = None
        _sweep(path.parent, but=path)

    def locate(self, epoch: int, version: int) -> Path:
        """Return the folder of a version. It exists only if the cache holds the whole version."""
        return self.path / f"e{epoch:08d}-v{version:08d}"

    def whole_versions(self) -> list[Path]:
        """Return the folders of the whole versions in the cache, newest first."""
        found = [
            (int(match[1]), int(match[2]), path)
            for path in self.path.iterdir()
            if (match := COMPLETE.fullmatch(path.name))
        ]
        return [path for _, _, path in sorted(found, reverse=True)]

    def newest(self) -> Base | None:
        """Return the newest whole version, as the base of a delta; None if there is none."""
        for folder in self.whole_versions():
            # A version whose manifest cannot be read is being removed.
            with contextlib.suppress(WeightsError):
                return read_manifest(folder / MANIFEST).as_base
        return None

    def trim(self) -> None:
        """Remove all but the newest versions."""
        for folder in self.whole_versions()[KEEP:]:
            _remove(folder)

    @contextlib.contextmanager
    def fetch_turn(self) -> Iterator[None]:
        """Hold the fetch lock while the context lasts.

        Raises:
            WeightsError: a different process has held it for `TURN_S`.
            Cancelled: this process ends.
        """
        # Invariant: only the holder of this lock adds versions to the cache or trims them. The kernel
        # releases the lock when its holder ends.
        with locked_file(
            self.path / FETCH, timeout_s=TURN_S, pause=self._pause, late=self._others_turn_lasts
        ):
            yield

    def _others_turn_lasts(self) -> WeightsError:
        return WeightsError(
            f"another process of this host has been fetching into {self.path} for more than {TURN_S:g} s; is it "
            "stopped?"
        )

    def _pause(self) -> None:
        """Wait a moment. Raise Cancelled if this process ends."""
        if self._cancelled.wait(POLL_S):
            raise Cancelled

    def enter(self) -> None:
        """Register this process as a user of the cache, so that nobody removes it.

        Raises:
            NameTaken: the cache folder belongs to a different user.
            Cancelled: this process ends.
        """
        # Invariant: a process removes the cache only while it holds the users file exclusively. A shared lock
        # on a users file that is still at its path therefore keeps the cache.
        if self._users is not None and is_at(self._users, self.path / USERS):
            return
        while True:
            make_private_folder(self.path)
            # These errors mean that the last user is removing the cache: try again.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                self._users = open(self.path / USERS, "ab")  # noqa: SIM115 (held as long as we use it)
                fcntl.flock(self._users, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if is_at(self._users, self.path / USERS):
                    return
            self._pause()

    def close(self) -> None:
        """Use the folder no more. The last process of this host that uses it removes it."""
        if self._users is None:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        self._users.close()
        self._users = None


def cache_folder(root: Path, run: str, broker: str) -> Path:
    """Return the cache folder that the processes of this host in a run share.

    Args:
        root: folder that holds the caches of this host.
        run: name of the run.
        broker: endpoint of the broker, which distinguishes runs of the same name.
    """
    digest = hashlib.sha256(f"{broker} {os.geteuid()}".encode()).hexdigest()[:12]
    return root / f"{CACHE_PREFIX}{run}-{digest}"


def _remove(folder: Path) -> None:
    """Rename a folder, so that nobody sees half of it. Delete it in a thread, because that takes time."""
    gone = folder.with_name(f"{folder.name}{PARTIAL}")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rename(gone)
    threading.Thread(target=shutil.rmtree, args=(gone, True), name="weights removal", daemon=True).start()


def _sweep(root: Path, *, but: Path) -> None:
    """Remove the caches that no process has open, and that have not changed for `ABANDONED_S`."""
    for folder in root.glob(f"{CACHE_PREFIX}*"):
        with contextlib.suppress(OSError):
            if (
                folder == but
                or not is_own_folder(folder)
                or time.time() - folder.stat().st_mtime < ABANDONED_S
            ):
                continue
            with open(folder / USERS, "ab") as users:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


class Cache:
    """Cache of the versions of one run on this host.

    Args:
        folder: folder that all processes of this host in the run share; see `cache_folder.cache_folder`.
        run: name of the run.
        access: returns the token and certificate of the run. It is called for each connection.
    """

    def __init__(self, folder: Path, run: str, access: Callable[[], Access] = Access) -> None:
        self.fetched_bytes = 0
        self.complaints: dict[str, bool] = {}
        """Sources that failed for the newest version while others were left, by URL, and all that ever lied: True.

        Invariant: it is replaced and never changed, because the thread that fetches writes it and others read it.
        """
        self._preparing: tuple[int, int] | None = None
        """Epoch and version for which a source says that it prepares the answer."""
        self._run, self._access = run, access
        self._cancelled = threading.Event()
        self._shared = CacheFolder(folder, self._cancelled)

    @property
    def folder(self) -> Path:
        """Folder that all processes of this host in the run share."""
        return self._shared.path

    def locate(self, epoch: int, version: int) -> Path:
        """Return the folder of a version. It exists only if the cache holds the whole version."""
        return self._shared.locate(epoch, version)

    def prepares(self, epoch: int, version: int) -> bool:
        """Return whether a source prepares this version for this process, so that the hosts behind it should wait."""
        return self._preparing == (epoch, version)

    def obtain(
        self, epoch: int, version: int, sources: Sequence[str], root: str = "", *, ordered: bool = False
    ) -> Path:
        """Return the path of a verified version's manifest. Fetch the version first if it is missing. Blocks.

        Args:
            epoch: epoch of the version.
            version: number of the version.
            sources: base URLs, tried in random order, but the last one last. Sources that lied before are left out.
            root: announced root hash. If it is empty, the first source that answers is believed.
            ordered: the sources are tried in their order, and those before the last may still be fetching themselves.

        Raises:
            WeightsError: no source sent the version (the message says why, for each), or a file operation
                failed, or this process ends.
        """
        tried = []
        self.complaints = {url: lied for url, lied in self.complaints.items() if lied}
        urls = [
            url
            for url in (sources if ordered else in_order(sources))
            if url not in self.complaints or url == sources[-1]
        ]
        for behind, url in zip(range(len(urls) - 1, -1, -1), urls, strict=True):
            try:
                self._shared.enter()
                return self._obtain_from(url, epoch, version, root, behind if ordered else 0)
            except SourceFailed as error:
                log.warning("version %d could not be fetched from %s: %s", version, url, error)
                tried.append(f"{url} {error}")
                if behind:
                    self.complaints = {**self.complaints, url: isinstance(error, WrongBytes)}
            except Cancelled:
                raise WeightsError(f"version {version}: this process ends") from None
            except OSError as error:
                raise WeightsError(f"version {version}: {error}") from None
        raise WeightsError(
            f"version {version} could not be had from any source: {'; '.join(tried) or 'none given'}; "
            "does `offbeat weights` run at the learner's host, and is its port open to this one?"
        )

    def close(self) -> None:
        """Cancel a running fetch. The last process of this host that uses the cache removes it."""
        self._cancelled.set()
        self._shared.close()

    def _obtain_from(self, url: str, epoch: int, version: int, root: str, behind: int) -> Path:
        source = self._connect(url)
        try:
            base = self._shared.newest()
            for told_by in dict.fromkeys((base, None)):
                try:
                    manifest = source.manifest(
                        epoch, version, told_by, behind, lambda: self._note_preparing(epoch, version)
                    )
                finally:
                    self._preparing = None
                self._check(manifest, epoch, version, root)
                try:
                    return self._complete(url, manifest, told_by, behind)
                except _DeltaUseless as error:
                    log.warning("version %d: %s; fetching it whole", version, error)
        finally:
            source.close()
        raise SourceFailed("sends a delta where the whole version was asked for")

    def _note_preparing(self, epoch: int, version: int) -> None:
        # Invariant: only what a source says is passed on, so that two relays cannot wait for each other.
        self._preparing = epoch, version

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

    def _complete(self, url: str, manifest: Manifest, told_by: Base | None, behind: int) -> Path:
        """Fetch a version from a source, unless the cache has it. Return the path of its manifest there."""
        folder = self.locate(manifest.epoch, manifest.version)
        with self._shared.fetch_turn():
            if (folder / MANIFEST).exists():
                if read_manifest(folder / MANIFEST).root == manifest.root:
                    return folder / MANIFEST
                # A different root hash: this version belongs to a different run of the same name.
                shutil.rmtree(folder)
            partial = folder.with_name(f"{folder.name}-{manifest.root[:16]}{PARTIAL}")
            for left in self.folder.glob(f"*{PARTIAL}"):
                if left != partial:
                    shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(mode=0o700, exist_ok=True)
            whole = self._fill(url, manifest, told_by, partial, behind)
            _write_manifest(partial, whole)
            partial.rename(folder)
            self._shared.trim()
        return folder / MANIFEST

    def _fill(
        self, url: str, manifest: Manifest, told_by: Base | None, partial: Path, behind: int
    ) -> Manifest:
        """Fetch a version or a delta into a folder. Return the manifest of the whole version that results.

        While it comes, the folder has the manifest of what comes, so that a relay can pass its chunks on.
        """
        data = partial / DATA

        def fetch_into(path: Path, also: Sequence[tuple[Path, Manifest]] = ()) -> None:
            self.fetched_bytes += fetch(
                lambda: self._connect(url),
                manifest,
                path,
                self._cancelled,
                also,
                begun=lambda: _write_manifest(partial, manifest),
                behind=behind,
            )

        if manifest.encoding == "full":
            also = [
                (folder / DATA, read_manifest(folder / MANIFEST))
                for folder in self._shared.whole_versions()[:1]
            ]
            try:
                fetch_into(data, also)
                with open(data, "rb") as file:
                    # The header alone, because each chunk was verified when it came.
                    verify_header(manifest, file)
            except WeightsError as error:
                shutil.rmtree(partial, ignore_errors=True)
                if isinstance(error, NoRoom):
                    raise
                raise WrongBytes(str(error)) from None
            return manifest
        if manifest.base != told_by:
            raise WrongBytes(f"sends a delta from {manifest.base}, asked for one from {told_by}")
        delta = partial / transfer_file(manifest)
        try:
            fetch_into(delta)
            self._apply(manifest, delta, data)
        except (WrongBytes, WeightsError) as error:
            data.unlink(missing_ok=True)
            delta.unlink(missing_ok=True)
            delta.with_name(delta.name + HELD).unlink(missing_ok=True)
            raise _DeltaUseless(f"the delta from {url} is of no use: {error}") from None
        delta.unlink()
        return msgspec.structs.replace(manifest, encoding="full", base=None, delta_bytes=0, delta_chunks=b"")

    def _apply(self, manifest: Manifest, delta: Path, data: Path) -> None:
        """Build the data file from its base and a delta, and verify it."""
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


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest so that readers see it whole or the one before."""
    fresh = folder / f"{MANIFEST}.new"
    fresh.write_bytes(msgspec.msgpack.encode(manifest))
    fresh.rename(folder / MANIFEST)


class _DeltaUseless(Exception):
    """A delta could not be used, so the whole version has to be fetched."""


def in_order(sources: Sequence[str]) -> list[str]:
    """Return the relays in a random order, so that hosts do not all ask one relay, then the learner.

    The learner is the last of ``sources``.

    Example:
        >>> in_order(["http://learner"]), in_order([])
        (['http://learner'], [])
    """
    *relays, last = sources or ("",)
    return [*random.sample(relays, len(relays)), *([last] if last else [])]
