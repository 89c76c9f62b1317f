"""The model's folder on a host that has none: fetched from the weights server, checked by hash, kept in a cache."""

import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from launch.errors import ConfigError, LaunchError, ModelRefused, NoHead
from launch.fleet.ticket import READ_BYTES, ModelFile, Ticket
from protocol.security.http import Access, access
from protocol.weights.server import MODEL_FILE

CACHE_VARIABLE = "XDG_CACHE_HOME"
ANSWER_S = 30.0
"""Longest wait for a byte of the weights server."""
TRY_S = 120.0
"""Time without a byte after which a host gives up."""
RETRY_S = 1.0
SERVER_FAULT = 500
"""Lowest status that blames the server, or says that it is busy. What is below would be the answer again."""


class FetchStopped(LaunchError):
    """A signal came before the whole model was here."""


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder in which models of tickets are kept.

    Example:
        >>> cache_folder({"XDG_CACHE_HOME": "/scratch/me"}).as_posix()
        '/scratch/me/offbeat/models'
    """
    own = environment.get(CACHE_VARIABLE)
    return (Path(own) if own else Path.home() / ".cache") / "offbeat" / "models"


def digest_of_model(files: Mapping[str, ModelFile]) -> str:
    """Return a hash of the names, lengths and hashes of a model's files: the name of its folder in the cache.

    Example:
        >>> one = ModelFile(nbytes=2, sha256="0" * 64)
        >>> digest_of_model({"a": one, "b": one}) == digest_of_model({"b": one, "a": one})
        True
    """
    listed = sorted((name, file.nbytes, file.sha256) for name, file in files.items())
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:24]


def model_of_ticket(
    ticket: Ticket,
    keys: Path | None,
    cache: Path,
    note: Callable[[str], None],
    leaving: Callable[[], bool] = lambda: False,
) -> Path | None:
    """Return the folder of the run's model on this host; None if it is of the hub. Fetch it if it is not here.

    Args:
        keys: keys folder of the host.
        cache: see `cache_folder`.
        note: shows a sentence to the user.
        leaving: whether this host was asked to end; it is looked at between blocks and tries.

    Raises:
        FetchStopped: it was.
        ConfigError: the ticket names a file that no server would send, or no weights server.
        NoHead: the server does not answer any more.
        ModelRefused: the server refuses, or has sent other bytes.
    """
    if not ticket.model:
        return None
    if wrong := [name for name in ticket.model if not re.fullmatch(MODEL_FILE, name)]:
        raise ConfigError(f"the ticket has a file of the model called {wrong[0]!r}; make it anew")
    folder = cache / digest_of_model(ticket.model)
    if folder.is_dir():
        return folder
    if not ticket.weights:
        # A ticket without a weights server is for the machine of the head, which has the model.
        return None
    cache.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    whole = sum(file.nbytes for file in ticket.model.values())
    note(f"model: fetching {whole / 1e6:,.1f} MB from {ticket.weights}")
    try:
        given = access(keys)
        for name, file in ticket.model.items():
            _fetch(f"{ticket.weights}/v1/model/{name}", file, partial / name, given, leaving)
        if not folder.is_dir():
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    note(f"model: {folder}")
    return folder


def _fetch(url: str, file: ModelFile, path: Path, given: Access, leaving: Callable[[], bool]) -> None:
    """Fetch one file. While the server does not answer, or is at its limit, try again for `TRY_S`."""
    tls = [urllib.request.HTTPSHandler(context=given.context)] if given.context else []
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({}), *tls)
    deadline = time.monotonic() + TRY_S
    while True:
        _go_on(url, leaving)
        request = urllib.request.Request(url)
        for name, value in given.headers.items():
            request.add_unredirected_header(name, value)
        try:
            with ask.open(request, timeout=ANSWER_S) as answer:
                _store(answer, file, path, url, leaving)
            return
        except urllib.error.HTTPError as error:
            # It is the answer, and holds the connection.
            error.close()
            if error.code < SERVER_FAULT:
                raise ModelRefused(
                    f"{url}: {error}; the head has another model or other keys than this ticket, so make the ticket "
                    "anew"
                ) from None
            why = str(error)
        except (OSError, http.client.HTTPException) as error:
            why = str(error)
        if time.monotonic() > deadline:
            raise NoHead(f"{url}: {why}; does the weights server run, is the way to it open?")
        time.sleep(RETRY_S)


def _go_on(url: str, leaving: Callable[[], bool]) -> None:
    if leaving():
        raise FetchStopped(f"{url}: a signal came while it was fetched")


def _store(
    answer: http.client.HTTPResponse, file: ModelFile, path: Path, url: str, leaving: Callable[[], bool]
) -> None:
    digest, left = hashlib.sha256(), file.nbytes
    with open(path, "wb") as out:
        while block := answer.read(min(READ_BYTES, left + 1)):
            _go_on(url, leaving)
            left -= len(block)
            if left < 0:
                break
            digest.update(block)
            out.write(block)
    if left > 0:
        raise OSError(f"{left} bytes are missing")
    if left < 0 or digest.hexdigest() != file.sha256:
        raise ModelRefused(
            f"{url}: other bytes than those that the ticket names; the model on the head has changed, so make the "
            "ticket anew"
        )
