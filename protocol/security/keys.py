"""Keys of a run on disk: one CURVE pair a role, more where single peers shall have their own, and a token for HTTP.

A keys folder holds ``NAME.pub`` and ``NAME.secret``, each one line of Z85. NAME is a role, or a role, a dash and
more: then the key is good for peers of this name only, and nobody else's key is. ``NAME@1.pub`` is an earlier key of
the same, still admitted. The public keys in a folder are the list of who is let in; a host needs no secret but its own.
"""

import logging
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import zmq

from protocol.errors import KeysUnusable
from protocol.security.key_checks import refuse_changeable, refuse_open_secret

log = logging.getLogger(__name__)

KeyRole = Literal["broker", "learner", "generator", "actor"]
ROLES: tuple[KeyRole, ...] = ("broker", "learner", "generator", "actor")
_NAME = re.compile(r"(broker|learner|generator|actor)(?:-[A-Za-z0-9][A-Za-z0-9._-]{0,199})?")
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MAX_FILE_BYTES = 256


class KeyPair(NamedTuple):
    """A CURVE pair, both in Z85."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class Principal:
    """Whom a key stands for: a role, and all its peers or those of one name."""

    role: KeyRole
    name: str

    @property
    def whole_role(self) -> bool:
        return self.name == self.role

    def owns(self, peer: str) -> bool:
        """Whether this name is that of the key, or begins with it and a dash."""
        return peer == self.name or peer.startswith(f"{self.name}-")


def principal(name: str) -> Principal:
    """Whom a name of a key stands for.

    Raises:
        KeysUnusable: it is not a name of a key.

    Example:
        >>> principal("actor-gpu7")
        Principal(role='actor', name='actor-gpu7')
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise KeysUnusable(
            f"{name!r} is no name of a key: use one of {', '.join(ROLES)}, or one with a dash and more, as actor-gpu7"
        )
    return Principal(match.group(1), name)  # type: ignore[arg-type]


class AllowList:
    """The public keys of a folder and whom each stands for."""

    def __init__(self, known: Mapping[str, Principal]) -> None:
        self._known = dict(known)
        self._named = [p for p in dict.fromkeys(known.values()) if not p.whole_role]

    @classmethod
    def read(cls, folder: Path) -> "AllowList":
        """From the files as they are now; what is no key, or others can change, is left out, with an error in the log.

        Raises:
            KeysUnusable: the folder cannot be read, or others can write to it.
        """
        known: dict[str, Principal] = {}
        try:
            mode = stat.S_IMODE(folder.stat().st_mode)
            if mode & 0o022:
                raise KeysUnusable(
                    f"keys folder {folder}: mode {mode:o} lets others add a key of theirs; do `chmod go-w {folder}`"
                )
            paths = sorted(path for path in folder.iterdir() if path.suffix == ".pub")
        except OSError as error:
            raise KeysUnusable(f"keys folder {folder}: cannot be read ({error.strerror})") from None
        for path in paths:
            try:
                refuse_changeable(path, path.stat().st_mode)
                known[read_key(path).decode()] = principal(path.stem.partition("@")[0])
            except (KeysUnusable, OSError) as error:
                log.error("left out: %s", error)
        return cls(known)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, public: str) -> Principal | None:
        """Whom this public key (Z85) stands for, if it is listed."""
        return self._known.get(public)

    def objection(self, who: Principal, peer: str) -> str:
        """Why a key of this principal must not speak for a peer of this name; empty if it may.

        Example:
            >>> actor, own = principal("actor"), principal("actor-gpu7")
            >>> allowed = AllowList({"a": actor, "b": own})
            >>> allowed.objection(own, "actor-gpu7-0"), allowed.objection(actor, "actor-0")
            ('', '')
            >>> allowed.objection(actor, "actor-gpu7-0")
            'the name actor-gpu7-0 belongs to the key actor-gpu7'
        """
        if not who.whole_role:
            return (
                ""
                if who.owns(peer)
                else f"this key is for peers called {who.name} or {who.name}-..., not {peer}"
            )
        for role in ROLES:
            if role != who.role and Principal(role, role).owns(peer):
                return f"the name {peer} belongs to the role {role}"
        owner = next((other for other in self._named if other.owns(peer)), None)
        return f"the name {peer} belongs to the key {owner.name}" if owner else ""


def signature(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes whenever a public key in the folder does.

    Raises:
        OSError: the folder cannot be read.
    """
    with os.scandir(folder) as entries:
        public = [entry for entry in entries if entry.name.endswith(".pub")]
        return tuple(sorted((e.name, (s := e.stat()).st_mtime_ns, s.st_ino) for e in public))


# --- reading ------------------------------------------------------------------------------------------------


def key_pair(folder: Path, role: KeyRole, peer: str = "") -> KeyPair:
    """The pair a peer uses: that of its own name if there is one, else that of its role.

    Raises:
        KeysUnusable: there is none, or others can read it, or its halves do not belong together.
    """
    name = _best(folder, role, peer, ".secret")
    path = folder / f"{name}.secret"
    named = sorted(p.stem for p in folder.glob(f"{role}-*.secret"))
    if not path.exists() and named:
        raise KeysUnusable(
            f"{folder} has no key for {peer or role}: the one in {named[0]}.secret is for peers called {named[0]} or "
            f"{named[0]}-...; give it such a name (--name {named[0]}-0), or make it a key of its own"
        )
    secret = read_key(path)
    refuse_open_secret(path, path.stat().st_mode)
    pair = KeyPair(zmq.curve_public(secret), secret)
    public = folder / f"{name}.pub"
    if public.exists() and read_key(public) != pair.public:
        raise KeysUnusable(
            f"{public} and {path.name} are not of one pair; bring both from where they were made"
        )
    return pair


def public_key(folder: Path, role: KeyRole, peer: str = "") -> bytes:
    """The public key of a peer that we connect to: that of its own name if there is one, else that of its role.

    Raises:
        KeysUnusable: there is none.
    """
    return read_key(folder / f"{_best(folder, role, peer, '.pub')}.pub")


def _best(folder: Path, role: KeyRole, peer: str, suffix: str) -> str:
    """Name of the key that fits a peer best; the longest one wins."""
    parts = peer.split("-") if peer.startswith(f"{role}-") else []
    for end in range(len(parts), 1, -1):
        name = "-".join(parts[:end])
        if _NAME.fullmatch(name) and (folder / f"{name}{suffix}").exists():
            return name
    return role


def read_key(path: Path) -> bytes:
    """The one key in a file, in Z85.

    Raises:
        KeysUnusable: it cannot be read, or is none.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise KeysUnusable(
            f"{path}: cannot be read ({error.strerror}); make keys with `offbeat keys make {path.parent}`, or bring "
            "them from the broker's host, where `offbeat keys bundle` picks what is needed"
        ) from None
    if not _KEY.fullmatch(text):
        raise KeysUnusable(f"{path}: not a key (40 characters of Z85); restore it, or make another key")
    return text.encode()
