"""Make, replace, revoke and hand out the keys of a run. Each file is written whole, in one step."""

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import zmq

from protocol.errors import KeysUnusable
from protocol.files import write_whole
from protocol.security.http import (
    CERTIFICATE_FILE,
    PRIVATE_FILE,
    TOKEN_BYTES,
    TOKEN_FILE,
    certificate_of,
    new_private_key,
    read_tokens,
    server_context,
)
from protocol.security.keys import ROLES, KeyRole, key_pair, principal, read_key

HTTP, TLS = "http", "tls"
"""Names that stand for the token and for the certificate of HTTP servers, beside the names of keys."""
HTTP_FILES = (TOKEN_FILE, CERTIFICATE_FILE, PRIVATE_FILE)
NEEDS: Mapping[KeyRole, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "broker": (("learner", "generator", "actor"), HTTP_FILES),
    "learner": (("broker",), HTTP_FILES),
    "generator": (("broker",), HTTP_FILES),
    "actor": (("broker",), ()),
    "host": (("broker",), (TOKEN_FILE, CERTIFICATE_FILE)),
}
"""Roles whose public keys a host needs, and HTTP files that it needs, by the role of the host.

The broker tells generators and actors the public keys of each other. It serves `/status`, and learners and
generators serve weights, so these roles need the HTTP files. A host that serves no weights to others needs no
private key of the certificate.
"""
_EARLIER = re.compile(r"[A-Za-z0-9._-]+@\d+")


def make(folder: Path, names: Iterable[str] = ROLES) -> list[str]:
    """Make those of these key pairs, the token and the certificate that are missing.

    Several processes may call it at the same time; all get the same files.

    Returns:
        Names of the pairs that this call made.

    Raises:
        KeysUnusable: a name is not the name of a key, or an existing file cannot be used.
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
    """Replace a key pair, the token (name "http"), or the certificate of HTTP servers (name "tls").

    Args:
        keep_earlier: the old key or token stays valid beside the new one. A certificate cannot be kept.

    Raises:
        KeysUnusable: there is nothing of this name, or ``keep_earlier`` is set for the certificate.
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
    """Revoke all keys of a name, or one earlier key ("actor@1"), and return the names of the files removed.

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
    """Copy the files that a host of this role, or of this one peer, needs to ``out``, and return their names.

    Raises:
        KeysUnusable: a file is missing, or ``out`` is not empty.
    """
    who = principal(name)
    # Raises if the pair cannot be used.
    key_pair(folder, who.role, who.name)
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
    """One key of a folder, as it is shown to people."""

    name: str
    secret: bool
    fingerprint: str
    age_s: float


def listing(folder: Path) -> list[Listed]:
    """List the keys of a folder.

    Raises:
        KeysUnusable: the folder or a key in it cannot be read.
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
    """Write the public half of a pair beside the secret half, unless it is there."""
    pair_secret = read_key(folder / f"{name}.secret")
    if not (folder / f"{name}.pub").exists():
        _replace(folder / f"{name}.pub", zmq.curve_public(pair_secret), 0o644)


def _write_new(path: Path, content: Callable[[], bytes], mode: int = 0o600) -> bool:
    """Write a file whole unless it exists, and return whether this call wrote it; the first process wins."""
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
