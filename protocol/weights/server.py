"""HTTP server of versions, with ranges, for the learner's folder or for versions that a host has fetched.

The learner's host serves the folder of the model there, too, so that a further host needs no copy of it.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import msgspec
from aiohttp import web

from protocol.errors import WeightsError
from protocol.security.addresses import is_wildcard
from protocol.security.http import require_token, scheme
from protocol.security.http import serving as serving_http
from protocol.weights.files import LARGEST_SHARE, digests, make_delta
from protocol.weights.format import DATA, MANIFEST, Base, Manifest, parse_manifest, read_manifest, same_layout
from protocol.weights.partial import PARTIAL, HeldChunks, transfer_file

log = logging.getLogger(__name__)

IDLE_S = 60.0
"""Seconds without a request after which a version is closed."""
MAX_NAMELESS = 2
"""Upper limit of the deleted versions that are kept open, and of the deltas."""

Locate = Callable[[int, int], Path]
"""Function that returns the folder of a version (epoch, number), whether or not it exists."""


@dataclass(eq=False)
class OpenVersion:
    """An open file to transfer, and the manifest that lists its chunks."""

    manifest: Manifest
    encoded: bytes
    file: IO[bytes]
    used: float = 0.0
    transfers: int = 0
    """Number of transfers that are going on now."""
    held: HeldChunks | None = None
    """Chunks that are there, of a version that this host is or was fetching; None: all are."""

    @property
    def whole(self) -> bool:
        """Whether all chunks are there."""
        return self.held is None or self.held.whole

    @property
    def nameless(self) -> bool:
        """Whether the file has no name any more, so that closing it frees its memory."""
        return os.fstat(self.file.fileno()).st_nlink == 0


class NotYet(WeightsError):
    """This host is not as far yet: it has not begun with a version, or has not got a chunk."""


class VersionOpener:
    """Opener of versions and maker of deltas.

    Its methods block. Several threads may call them at the same time for different keys.

    Args:
        run: name of the run; versions of a different run are refused.
        locate: returns the folder of a version. Only whole versions lie there: a rename puts them there.
        scratch: folder for deltas, which have no names there; on the same memory as the versions.
        passes_on: whether versions that are being fetched are served, too. They lie beside the whole ones.
    """

    def __init__(
        self,
        run: str,
        locate: Locate,
        scratch: Path,
        *,
        passes_on: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._locate, self._scratch, self._clock = run, locate, scratch, clock
        self.passes_on = passes_on

    def open(self, epoch: int, version: int) -> OpenVersion:
        """Open a whole version.

        Raises:
            WeightsError: it is not there (any more), or its folder holds something else.
        """
        folder = self._locate(epoch, version)
        manifest = read_manifest(folder / MANIFEST)
        if (manifest.run, manifest.epoch, manifest.version) != (self._run, epoch, version):
            raise WeightsError(
                f"{folder} holds epoch {manifest.epoch} version {manifest.version} of run {manifest.run!r}"
            )
        try:
            file = open(folder / DATA, "rb")  # noqa: SIM115 (held open while it is served)
        except OSError as error:
            raise WeightsError(f"{folder}: {error}") from None
        try:
            size = os.fstat(file.fileno()).st_size
            if size != manifest.nbytes:
                raise WeightsError(f"{folder}: {DATA} has {size} bytes, its manifest says {manifest.nbytes}")
        except BaseException:
            file.close()
            raise
        return self._opened_version(manifest, file)

    def open_partial(self, epoch: int, version: int, base: Base | None) -> OpenVersion:
        """Open a version, or the delta from ``base``, that this host is fetching just now.

        Raises:
            NotYet: it is not being fetched, in this form.
            WeightsError: this host has a newer version, so it will not fetch this one.
        """
        final = self._locate(epoch, version)
        for folder in final.parent.glob(f"{final.name}-*{PARTIAL}"):
            # What cannot be read has not begun, or is being removed.
            with contextlib.suppress(WeightsError, OSError):
                manifest = read_manifest(folder / MANIFEST)
                if (manifest.run, manifest.base) == (self._run, base):
                    path = folder / transfer_file(manifest)
                    held = HeldChunks(path, -(-manifest.transfer_bytes // manifest.chunk_bytes))
                    opened = self._opened_version(manifest, open(path, "rb"))  # noqa: SIM115 (held open)
                    opened.held = held
                    return opened
        for other in final.parent.glob("e*-v*"):
            if other.name > final.name and not other.name.endswith(PARTIAL):
                raise WeightsError(f"version {version} is behind {other.name}, which this host has")
        raise NotYet(f"version {version} is not here yet")

    def replaced(self, epoch: int, version: int, held: OpenVersion | None) -> bool:
        """Return whether a different file lies now where ``held`` was opened; False if no file lies there."""
        if held is None:
            return False
        try:
            now = (self._locate(epoch, version) / DATA).stat()
        except OSError:
            return False
        return not os.path.samestat(now, os.fstat(held.file.fileno()))

    def delta(self, new: OpenVersion, base: OpenVersion) -> OpenVersion | None:
        """Make the delta from ``base`` to ``new``; return None if the whole version is the better choice."""
        if not same_layout(base.manifest.tensors, new.manifest.tensors):
            return None
        nbytes = new.manifest.nbytes
        file = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115 (held open while it is served)
        try:
            size = make_delta(
                base.file.fileno(),
                new.file.fileno(),
                nbytes,
                file.fileno(),
                largest=int(nbytes * LARGEST_SHARE),
            )
            if size is None:
                file.close()
                return None
            manifest = msgspec.structs.replace(
                new.manifest,
                encoding="xor-zstd",
                base=base.manifest.as_base,
                delta_bytes=size,
                delta_chunks=digests(file.fileno(), size, new.manifest.chunk_bytes),
            )
        except BaseException:
            file.close()
            raise
        return self._opened_version(manifest, file)

    def _opened_version(self, manifest: Manifest, file: IO[bytes]) -> OpenVersion:
        encoded = msgspec.msgpack.encode(manifest)
        # Serve nothing that clients would refuse.
        parse_manifest(encoded, f"version {manifest.version}")
        return OpenVersion(manifest, encoded, file, self._clock())


VersionKey = tuple[int, int, Base | None]
"""Epoch, version, and the base of the delta; None: the whole version."""


def versions_to_close(held: dict[VersionKey, OpenVersion], now: float) -> list[VersionKey]:
    """Return what to close: idle versions, and the longest unused nameless ones beyond `MAX_NAMELESS`."""
    free = sorted((key for key in held if not held[key].transfers), key=lambda key: held[key].used)
    gone = [key for key in free if now - held[key].used > IDLE_S]
    for deltas in (False, True):
        nameless = [key for key in held if (key[2] is not None) == deltas and held[key].nameless]
        closable = [key for key in free if key in nameless and key not in gone]
        excess = len([key for key in nameless if key not in gone]) - MAX_NAMELESS
        gone += closable[: max(0, excess)]
    return gone


MAX_TRANSFERS = 64
MAX_WAITING = 2_048
"""Requests that may wait for one of the transfers to end. Others are told to come again at once."""
PLACE_S = 2.0
"""Seconds that a request for data waits, in the order of coming, before it is told to come again."""
PATIENCE_S = 2.0
"""Seconds that a request waits for a manifest before the server answers 202."""
WAIT_S = 3.0
"""Seconds that a request waits for a chunk that this host has not got yet. Then the client is told so."""
LOOK_S = 0.01
TRANSFER_S = 60.0
SLOWEST_BYTES_PER_S = 64 * 2**10
"""A transfer is cut after `TRANSFER_S` and the time that its bytes take at this pace."""
PIECE_BYTES = 2**20
TIDY_S = 5.0
CLOSE_S = 1.0
BASE = re.compile(r"(\d{1,19})\.(\d{1,19})\.([0-9a-f]{64})")
VERSION_PATH = r"/v1/{epoch:\d{1,18}}/{version:\d{1,18}}"
MODEL_FILE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}"
"""Names of files of a model's folder that are served: none in a folder below it, and none that is hidden."""
MODEL_PATH = f"/v1/model/{{name:{MODEL_FILE}}}"


def url_for_others(host: str, port: int, name: str = "", keys: Path | None = None) -> str:
    """Return the URL under which other hosts reach a server.

    Args:
        name: name of this machine for other hosts; needed if ``host`` stands for all its addresses.
        keys: keys folder of the server; with it the server speaks TLS.

    Example:
        >>> url_for_others("127.0.0.1", 5757), url_for_others("0.0.0.0", 5757, "node-3"), url_for_others("::1", 80)
        ('http://127.0.0.1:5757', 'http://node-3:5757', 'http://[::1]:80')
    """
    at = name if name and is_wildcard(host) else host
    return f"{scheme(keys)}://[{at}]:{port}" if ":" in at else f"{scheme(keys)}://{at}:{port}"


class WeightsServer:
    """An aiohttp application over a folder of versions.

    Args:
        run: name of the run.
        locate: returns the folder of a version.
        scratch: folder for deltas, see `VersionOpener`.
        keys: keys folder of the run, for its token and certificate; None: no token, and nothing is encrypted.
        model: returns the folder of the model that the run starts from, for hosts that have none, or None while it is
            not there. It may block, and is called until it returns a folder.
        transfers: transfers that may go on at a time.
        passes_on: whether chunks of versions that are still being fetched are served, as they come.
        prepares: returns whether the source of this host prepares a version (epoch, number), so that others wait.
    """

    def __init__(
        self,
        run: str,
        locate: Locate,
        scratch: Path,
        keys: Path | None = None,
        model: Callable[[], Path | None] = lambda: None,
        *,
        transfers: int = MAX_TRANSFERS,
        passes_on: bool = False,
        prepares: Callable[[int, int], bool] = lambda epoch, version: False,
    ) -> None:
        self._run, self._shelf = run, VersionOpener(run, locate, scratch, passes_on=passes_on)
        self._prepares = prepares
        self.keys, self._model_folder = keys, model
        self._model: Path | None = None
        self._held: dict[VersionKey, OpenVersion] = {}
        self._opening: dict[VersionKey, asyncio.Task[OpenVersion | None]] = {}
        self._retired: list[OpenVersion] = []
        self._transfers = self._waiting = 0
        self._places = asyncio.Semaphore(transfers)
        self.application = web.Application(middlewares=[require_token(keys)])
        self.application.router.add_get("/", self._about, allow_head=False)
        self.application.router.add_get(VERSION_PATH + "/manifest", self._manifest, allow_head=False)
        self.application.router.add_get(VERSION_PATH + "/data", self._data, allow_head=False)
        self.application.router.add_get(VERSION_PATH + "/held", self._how_much, allow_head=False)
        self.application.router.add_get(MODEL_PATH, self._model_file, allow_head=False)
        self.application.cleanup_ctx.append(self._tidying)

    async def _about(self, request: web.Request) -> web.Response:
        held = [{"epoch": e, "version": v, "base": base and base.version} for e, v, base in self._held]
        return web.json_response(
            {"run": self._run, "held": held, "transfers": self._transfers}, dumps=json.dumps
        )

    async def _manifest(self, request: web.Request) -> web.Response:
        epoch, version, base = _requested_key(request)
        held, waits = None, False
        try:
            async with asyncio.timeout(PATIENCE_S):
                while held is None:
                    try:
                        if base is not None:
                            held = await self._open_once((epoch, version, base))
                        if held is None:
                            held = await self._open_once((epoch, version, None))
                        waits = False
                    except NotYet:
                        waits = True
                        await asyncio.sleep(LOOK_S)
        except TimeoutError:
            if waits and not self._prepares(epoch, version):
                raise _not_yet(f"version {version} is not here yet") from None
            return web.Response(status=202, headers={"Retry-After": "1"})
        except WeightsError as error:
            raise web.HTTPNotFound(text=f"404: {error}\n") from None
        assert held is not None
        return web.Response(body=held.encoded, content_type="application/msgpack")

    async def _data(self, request: web.Request) -> web.StreamResponse:
        held = self._held.get(_requested_key(request))
        try:
            held = held or await self._open_once(_requested_key(request))
        except NotYet as error:
            raise _not_yet(str(error)) from None
        except WeightsError as error:
            raise web.HTTPNotFound(text=f"404: {error}\n") from None
        if held is None:
            raise web.HTTPNotFound(text="404: there is no such delta; ask for its manifest first\n")
        # Count the version as used, so that it is not closed while the request waits.
        held.transfers += 1
        try:
            async with self._place():
                return await _send(
                    request,
                    held.file,
                    held.manifest.transfer_bytes,
                    partial(_there, held) if held.held else _all,
                )
        finally:
            held.transfers -= 1
            held.used = time.monotonic()

    async def _how_much(self, request: web.Request) -> web.Response:
        """Tell how much of a version is here, and how fast it came: a slow line is no wait."""
        held = self._held.get(_requested_key(request))
        if held is None or held.held is None:
            raise web.HTTPNotFound(text="404: this host does not fetch it\n")
        step, here = held.manifest.chunk_bytes, held.held
        told = {
            "bytes": here.number * step,
            "come": here.come * step,
            "seconds": here.seconds(time.monotonic()),
        }
        return web.json_response(told, dumps=json.dumps)

    async def _model_file(self, request: web.Request) -> web.StreamResponse:
        """Send a file of the model's folder, or a range of it. The client knows its hash from elsewhere."""
        if self._model is None:
            self._model = await asyncio.to_thread(self._model_folder)
        if self._model is None:
            # Somebody makes it just now. A 404 would say that it never comes.
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "1"})
        path = self._model / request.match_info["name"]
        if not path.is_file():
            raise web.HTTPNotFound(text="404: the model has no such file\n")
        async with self._place():
            # Not aiohttp's FileResponse: it is prepared again behind the handler, which fails for one that was sent.
            with await asyncio.to_thread(path.open, "rb", buffering=0) as file:
                return await _send(request, file, os.fstat(file.fileno()).st_size)

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Hold a place among the transfers while the context lasts. Wait for one, in the order of coming.

        A place that becomes free is taken at once, as it would not be by clients that only ask again.
        """
        if self._waiting >= MAX_WAITING:
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "1"})
        self._waiting += 1
        try:
            async with asyncio.timeout(PLACE_S):
                await self._places.acquire()
        except TimeoutError:
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "1"}) from None
        finally:
            self._waiting -= 1
        self._transfers += 1
        try:
            yield
        finally:
            self._transfers -= 1
            self._places.release()

    async def _open_once(self, key: VersionKey) -> OpenVersion | None:
        """Return the version or delta of a key, opened once for all requests; None if no delta is made."""
        held = self._held.get(key)
        if held is not None and self._shelf.replaced(key[0], key[1], self._held.get((*key[:2], None))):
            for other in [other for other in self._held if other[:2] == key[:2]]:
                self._retired.append(self._held.pop(other))
            held = None
        if held is not None and held.nameless and not held.whole:
            # Its transfer has been given up. Another one may have begun.
            self._retired.append(self._held.pop(key))
            held = None
        if held is not None:
            held.used = time.monotonic()
            return held
        if key not in self._opening:
            self._opening[key] = asyncio.create_task(self._prepare(key))
            self._opening[key].add_done_callback(partial(self._opened, key))
        return await asyncio.shield(self._opening[key])

    def _opened(self, key: VersionKey, task: "asyncio.Task[OpenVersion | None]") -> None:
        self._opening.pop(key, None)
        # Log the error here, because perhaps no request waits for the task any more.
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, NotYet):
            log.info("version %d cannot be served: %s", key[1], error)

    async def _prepare(self, key: VersionKey) -> OpenVersion | None:
        epoch, version, base = key
        if base is None:
            self._held[key] = await asyncio.to_thread(self._open_as_it_is, epoch, version)
            return self._held[key]
        if self._shelf.passes_on:
            with contextlib.suppress(WeightsError):
                self._held[key] = await asyncio.to_thread(self._shelf.open_partial, epoch, version, base)
                return self._held[key]
        new = await self._open_once((epoch, version, None))
        try:
            old = await self._open_once((base.epoch, base.version, None))
        except WeightsError:
            return None
        assert new is not None
        if old is None or old.manifest.root != base.root or not (old.whole and new.whole):
            return None
        # Count a transfer of each, so that neither is closed meanwhile.
        new.transfers += 1
        old.transfers += 1
        try:
            delta = await asyncio.to_thread(self._shelf.delta, new, old)
        finally:
            new.transfers -= 1
            old.transfers -= 1
        if delta is not None:
            self._held[key] = delta
        return delta

    def _open_as_it_is(self, epoch: int, version: int) -> OpenVersion:
        """Open a whole version or, if this server passes chunks on, one that is being fetched whole."""
        try:
            return self._shelf.open(epoch, version)
        except WeightsError:
            if not self._shelf.passes_on:
                raise
            return self._shelf.open_partial(epoch, version, None)

    async def _tidying(self, application: web.Application) -> AsyncIterator[None]:
        tidy = asyncio.create_task(self._tidy())
        yield
        tidy.cancel()
        for task in list(self._opening.values()):
            task.cancel()
        await asyncio.wait([tidy, *self._opening.values()], timeout=CLOSE_S)
        for held in [*self._held.values(), *self._retired]:
            held.file.close()
        self._held.clear()

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            for key in versions_to_close(self._held, time.monotonic()):
                self._held.pop(key).file.close()
            for held in [held for held in self._retired if not held.transfers]:
                self._retired.remove(held)
                held.file.close()


def _requested_key(request: web.Request) -> VersionKey:
    base, text = None, request.query.get("base", "")
    if text:
        match = BASE.fullmatch(text)
        if match is None:
            raise web.HTTPBadRequest(text="400: write base=EPOCH.VERSION.ROOT\n")
        base = Base(int(match[1]), int(match[2]), match[3])
    return int(request.match_info["epoch"]), int(request.match_info["version"]), base


def _not_yet(text: str) -> web.HTTPNotFound:
    """Return the answer that a client which knows relays waits behind; others ask elsewhere."""
    return web.HTTPNotFound(text=f"404: {text}\n", headers={"Retry-After": "1"})


Available = Callable[[int, int], Awaitable[int]]
"""Function that waits for the byte at ``start``, and returns the end of what is there from it on, at most ``stop``."""


async def _all(start: int, stop: int) -> int:
    return stop


async def _there(version: OpenVersion, start: int, stop: int) -> int:
    """Wait for a chunk of a version that is being fetched, see `Available`.

    Raises:
        NotYet: it has not come within `WAIT_S`, or its transfer was given up.
    """
    held, step = version.held, version.manifest.chunk_bytes
    assert held is not None
    deadline = time.monotonic() + WAIT_S
    while not held.has(start // step):
        if version.nameless or time.monotonic() > deadline:
            raise NotYet(f"byte {start} has not come yet")
        await asyncio.sleep(LOOK_S)
    end = start // step + 1
    while end * step < stop and held.has(end):
        end += 1
    return min(stop, end * step)


async def _send(
    request: web.Request, file: IO[bytes], size: int, available: Available = _all
) -> web.StreamResponse:
    """Send the first ``size`` bytes of a file or the range asked for; without TLS by sendfile, past this process."""
    try:
        wanted = request.http_range
    except ValueError:
        raise web.HTTPRequestRangeNotSatisfiable from None
    start, stop, _ = wanted.indices(size)
    if wanted.start is not None and start >= stop:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"})
    try:
        if start < stop:
            await available(start, stop)
    except NotYet as error:
        raise _not_yet(str(error)) from None
    response = web.StreamResponse(status=200 if wanted.start is None and wanted.stop is None else 206)
    response.content_length = stop - start
    response.content_type = "application/octet-stream"
    if response.status == 206:
        response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    transport = request.transport
    try:
        async with asyncio.timeout(TRANSFER_S + (stop - start) / SLOWEST_BYTES_PER_S):
            await response.prepare(request)
            if transport is None or transport.is_closing():
                raise ConnectionResetError("the client has gone")
            while start < stop:
                end = await available(start, stop)
                if transport.get_extra_info("sslcontext") is None:
                    await asyncio.get_running_loop().sendfile(transport, file, start, end - start)
                else:
                    await _send_pieces(response, file, start, end)
                start = end
            await response.write_eof()
    except (TimeoutError, ConnectionError, NotYet) as error:
        if isinstance(error, TimeoutError):
            log.warning(
                "a transfer to %s was cut: slower than %d bytes/s", request.remote, SLOWEST_BYTES_PER_S
            )
        if transport is not None:
            transport.abort()
    return response


async def _send_pieces(response: web.StreamResponse, file: IO[bytes], start: int, stop: int) -> None:
    """Send a range under TLS, where asyncio's `sendfile` would refill its buffer before it is sent."""
    while start < stop:
        piece = await asyncio.to_thread(os.pread, file.fileno(), min(PIECE_BYTES, stop - start), start)
        if not piece:
            raise ConnectionAbortedError(f"{file.name} has become shorter")
        await response.write(piece)
        start += len(piece)


def serving(server: WeightsServer, host: str, port: int) -> contextlib.AbstractAsyncContextManager[int]:
    """Serve until the context is left, and yield the bound port, which differs from ``port`` if that is 0.

    Raises:
        OSError: the address cannot be bound.
        KeysUnusable: the keys folder lacks the certificate.
    """
    return serving_http(server.application, host, port, server.keys, shutdown_s=CLOSE_S)
