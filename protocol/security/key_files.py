"""Making, replacing, revoking and handing out the keys of a run, file by file and each of them at once."""

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import zmq

from protocol.errors import KeysUnusable
from protocol.security.http_tls import (
    CERTIFICATE_FILE,
    PRIVATE_FILE,
    certificate_of,
    new_private_key,
    server_context,
)
from protocol.security.http_token import TOKEN_BYTES, TOKEN_FILE, read_tokens
from protocol.security.keys import ROLES, KeyRole, key_pair, principal, read_key
from protocol.whole_files import write_whole

HTTP, TLS = "http", "tls"
"""Stand for the token, and for the certificate of HTTP servers, among the names."""
HTTP_FILES = (TOKEN_FILE, CERTIFICATE_FILE, PRIVATE_FILE)
NEEDS: Mapping[KeyRole, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "broker": (("learner", "generator", "actor"), HTTP_FILES),
    "learner": (("broker",), HTTP_FILES),
    "generator": (("broker", "actor"), HTTP_FILES),
    "actor": (("broker", "generator"), ()),
}
"""Whose public keys a host of a role needs, and which files of HTTP: learners and generators serve weights, too."""
_EARLIER = re.compile(r"[A-Za-z0-9._-]+@\d+")


def make(folder: Path, names: Iterable[str] = ROLES) -> list[str]:
    """Make what is missing of these pairs, the token and the certificate.

    Several processes may do so at once, and get the same.

    Returns:
        names of the pairs that this call made.

    Raises:
        KeysUnusable: a name is not one of a key, or what is there cannot be used.
        OSError: the folder cannot be written.
    """
    names = [principal(name).name for name in names]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = []
    for name in names:
        if _write_new(folder / f"{name}.secret", lambda: zmq.curve_keypair()[1]):
            made.append(name)
        _publish(folder, name)
    _write_new(folder / TOKEN_FILE, lambda: secrets.token_hex(TOKEN_BYTES).encode())
    read_tokens(folder)
    private = folder / PRIVATE_FILE
    _write_new(private, new_private_key)
    _write_new(folder / CERTIFICATE_FILE, lambda: certificate_of(private.read_bytes()), 0o644)
    server_context(folder)
    return made


def rotate(folder: Path, name: str, *, keep_earlier: bool = False) -> None:
    """Replace a pair, or the token (name "http"); ``keep_earlier``: those who have the one before are let in as well.

    The certificate of HTTP servers (name "tls") has no earlier one.

    Raises:
        KeysUnusable: there is nothing of this name, or no earlier one of it can be kept.
    """
    if name == TLS:
        if keep_earlier:
            raise KeysUnusable("a server shows one certificate: rotate tls without --keep-old")
        private = new_private_key()
        _replace(folder / PRIVATE_FILE, private, 0o600)
        _replace(folder / CERTIFICATE_FILE, certificate_of(private), 0o644)
        return
    if name == HTTP:
        earlier = read_tokens(folder)[:1] if keep_earlier else []
        _replace(folder / TOKEN_FILE, "\n".join([secrets.token_hex(TOKEN_BYTES), *earlier]).encode(), 0o600)
        return
    who = principal(name)
    before = read_key(folder / f"{who.name}.pub")
    for path in [] if keep_earlier else _earlier(folder, who.name):
        path.unlink()
    if keep_earlier:
        numbers = [int(path.stem.rpartition("@")[2]) for path in _earlier(folder, who.name)]
        _replace(folder / f"{who.name}@{max(numbers, default=0) + 1}.pub", before, 0o644)
    public, secret = zmq.curve_keypair()
    _replace(folder / f"{who.name}.secret", secret, 0o600)
    _replace(folder / f"{who.name}.pub", public, 0o644)


def revoke(folder: Path, name: str) -> list[str]:
    """Let a key in no longer: all of a name, or one earlier key ("actor@1"); returns the files removed.

    Raises:
        KeysUnusable: there is no such key.
    """
    if _EARLIER.fullmatch(name):
        principal(name.partition("@")[0])
        paths = [folder / f"{name}.pub"]
    else:
        who = principal(name)
        own = [folder / f"{who.name}.pub", folder / f"{who.name}.secret"]
        paths = [*own, *_earlier(folder, who.name)]
    paths = [path for path in paths if path.exists()]
    if not paths:
        raise KeysUnusable(
            f"{folder} holds no key {name!r}; `offbeat keys show {folder}` lists what it holds"
        )
    for path in paths:
        path.unlink()
    return [path.name for path in paths]


def bundle(folder: Path, name: str, out: Path) -> list[str]:
    """Copy to ``out`` what a host of this role (or of this one peer) needs and nothing more; returns file names.

    Raises:
        KeysUnusable: something of it is missing, or ``out`` holds anything already.
    """
    who = principal(name)
    key_pair(folder, who.role, who.name)  # usable?
    if not (folder / f"{who.name}.secret").exists():
        raise KeysUnusable(
            f"{folder} holds no key {name!r}; make it with `offbeat keys make {folder} {name}`"
        )
    others, http_files = NEEDS[who.role]
    names = [f"{who.name}.secret", f"{who.name}.pub"]
    names += [p.name for p in sorted(folder.glob("*.pub")) if _role_of(p) in others]
    names += http_files
    if absent := [file for file in http_files if not (folder / file).exists()]:
        raise KeysUnusable(f"{folder} lacks {', '.join(absent)}; do `offbeat keys make {folder}`")
    if missing := [role for role in others if f"{role}.pub" not in names and not _any(names, role)]:
        raise KeysUnusable(
            f"{folder} holds no public key of {', '.join(missing)}; do `offbeat keys make {folder}`"
        )
    if out.exists() and any(out.iterdir()):
        raise KeysUnusable(f"{out} is not empty; name a folder that does not exist")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in names:
        public = file.endswith((".pub", ".crt"))
        _replace(out / file, (folder / file).read_bytes().strip(), 0o644 if public else 0o600)
    return names


class Listed(NamedTuple):
    """One key of a folder, for people."""

    name: str
    secret: bool
    fingerprint: str
    age_s: float


def listing(folder: Path) -> list[Listed]:
    """What a folder holds.

    Raises:
        KeysUnusable: it cannot be read.
    """
    if not folder.is_dir():
        raise KeysUnusable(f"{folder} is not a folder; make keys with `offbeat keys make {folder}`")
    listed = []
    for path in sorted(folder.glob("*.pub")):
        age = max(0.0, time.time() - path.stat().st_mtime)
        listed.append(
            Listed(path.stem, path.with_suffix(".secret").exists(), read_key(path).decode()[:8], age)
        )
    return listed


def _role_of(path: Path) -> str:
    try:
        return principal(path.stem.partition("@")[0]).role
    except KeysUnusable:
        return ""


def _any(names: Iterable[str], role: str) -> bool:
    return any(name.startswith(f"{role}-") for name in names)


def _earlier(folder: Path, name: str) -> list[Path]:
    return [path for path in sorted(folder.glob(f"{name}@*.pub")) if _EARLIER.fullmatch(path.stem)]


def _publish(folder: Path, name: str) -> None:
    """Write the public half beside the secret one, unless it is there."""
    pair_secret = read_key(folder / f"{name}.secret")
    if not (folder / f"{name}.pub").exists():
        _replace(folder / f"{name}.pub", zmq.curve_public(pair_secret), 0o644)


def _write_new(path: Path, content: Callable[[], bytes], mode: int = 0o600) -> bool:
    """Write a file whole, unless there is one; whoever comes first decides."""
    if path.exists():
        return False
    own = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    _replace(own, content(), mode)
    try:
        os.link(own, path)
    except FileExistsError:
        return False
    finally:
        own.unlink()
    return True


def _replace(path: Path, content: bytes, mode: int) -> None:
    write_whole(path, content + b"\n", mode=mode, shared=True)
