"""Keys of a run on disk: a CURVE pair per role, further pairs for single peers; and checks of all files of keys."""

import logging
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import zmq

from protocol.errors import KeysUnusable

log = logging.getLogger(__name__)


def refuse_open_secret(path: Path, mode: int) -> None:
    """Raise KeysUnusable if others can read or change a secret, or its group can change it.

    Args:
        mode: mode of the file, from `os.stat`.
    """
    if mode & 0o027:
        raise KeysUnusable(
            f"{path}: mode {stat.S_IMODE(mode):o} lets others read or change it; do `chmod 600 {path}`"
        )


def refuse_changeable(path: Path, mode: int) -> None:
    """Raise KeysUnusable if others, or its group, can change a file that everybody may read."""
    if mode & 0o022:
        raise KeysUnusable(
            f"{path}: mode {stat.S_IMODE(mode):o} lets others change it; do `chmod go-w {path}`"
        )


def unreadable(path: Path, error: OSError) -> KeysUnusable:
    """Return the error to raise if a file of HTTP (token, certificate, private key) cannot be read."""
    return KeysUnusable(
        f"{path}: cannot be read ({error.strerror}); make it with `offbeat keys make {path.parent}`, or copy the keys "
        "folder of the run to this host"
    )


KeyRole = Literal["broker", "learner", "generator", "actor", "host"]
ROLES: tuple[KeyRole, ...] = ("broker", "learner", "generator", "actor")
"""Roles that have a key for all their peers. "host" has none: each host has a key of its own, such as host-gpu7."""
HOST: KeyRole = "host"
OF_HOST: tuple[KeyRole, ...] = ("generator", "actor")
"""Roles of the peers that a host's key is for."""
_NAME = re.compile(
    r"(broker|learner|generator|actor)(?:-[A-Za-z0-9][A-Za-z0-9._-]{0,199})?|(host)-[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
)
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MAX_FILE_BYTES = 256


class KeyPair(NamedTuple):
    """A CURVE key pair, both halves in Z85."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class Principal:
    """The owner of a key: all peers of a role, or the peers of one name."""

    role: KeyRole
    name: str
    public: str = field(default="", compare=False)
    """The key itself (Z85); "" if it is not known. One owner may have several keys, so it does not compare."""

    @property
    def whole_role(self) -> bool:
        """Whether the key is for all peers of the role."""
        return self.name == self.role

    @property
    def roles(self) -> tuple[KeyRole, ...]:
        """Roles of the peers that may use the key.

        Example:
            >>> principal("host-gpu7").roles, principal("actor-gpu7").roles
            (('generator', 'actor'), ('actor',))
        """
        return OF_HOST if self.role == HOST else (self.role,)

    @property
    def names(self) -> tuple[str, ...]:
        """Beginnings of the names of these peers: one for each role.

        Example:
            >>> principal("host-gpu7").names
            ('generator-gpu7', 'actor-gpu7')
        """
        if self.role != HOST:
            return (self.name,)
        return tuple(f"{role}-{self.name.removeprefix(f'{HOST}-')}" for role in OF_HOST)

    def owns(self, peer: str) -> bool:
        """Return whether a peer's name is one of `names`, or begins with one and a dash.

        Example:
            >>> host = principal("host-gpu7")
            >>> host.owns("actor-gpu7-0"), host.owns("generator-gpu7-1"), host.owns("actor-gpu70-0")
            (True, True, False)
        """
        return any(peer == name or peer.startswith(f"{name}-") for name in self.names)


def principal(name: str, public: str = "") -> Principal:
    """Return the principal of a key's name.

    Args:
        public: the key (Z85), if it is known.

    Raises:
        KeysUnusable: this is not the name of a key.

    Example:
        >>> principal("actor-gpu7")
        Principal(role='actor', name='actor-gpu7', public='')
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise KeysUnusable(
            f"{name!r} is no name of a key: use one of {', '.join(ROLES)}, or one with a dash and more, as actor-gpu7, "
            "or host-gpu7 for a generator and actors of one host"
        )
    return Principal(match.group(1) or match.group(2), name, public)  # type: ignore[arg-type]


class AllowList:
    """Admitted public keys, and the principal of each."""

    def __init__(self, known: Mapping[str, Principal]) -> None:
        self._known = dict(known)
        self._named = [p for p in dict.fromkeys(known.values()) if not p.whole_role]

    @classmethod
    def read(cls, folder: Path) -> "AllowList":
        """Read the public keys of a folder.

        A file that is no key, or that others can change, is left out with an error in the log.

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
                key = read_key(path).decode()
                known[key] = principal(path.stem.partition("@")[0], key)
            except (KeysUnusable, OSError) as error:
                log.error("left out: %s", error)
        return cls(known)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, public: str) -> Principal | None:
        """Return the principal of a public key (Z85), or None if the key is not listed."""
        return self._known.get(public)

    def keys_of(self, role: KeyRole) -> list[str]:
        """Return the public keys (Z85) of a role, and of single peers and hosts that have it, in ascending order."""
        return sorted(key for key, who in self._known.items() if role in who.roles)

    def objection(self, who: Principal, peer: str) -> str:
        """Return why a key of this principal must not be used by a peer of this name; "" if it may.

        Example:
            >>> actor, own = principal("actor"), principal("actor-gpu7")
            >>> allowed = AllowList({"a": actor, "b": own})
            >>> allowed.objection(own, "actor-gpu7-0"), allowed.objection(actor, "actor-0")
            ('', '')
            >>> allowed.objection(actor, "actor-gpu7-0")
            'the name actor-gpu7-0 belongs to the key actor-gpu7'
            >>> gpu, other = principal("host-gpu"), principal("host-gpu-7")
            >>> AllowList({"a": gpu, "b": other}).objection(gpu, "actor-gpu-7-0")
            'the name actor-gpu-7-0 belongs to the key host-gpu-7'
        """
        if not who.whole_role:
            if not who.owns(peer):
                names = " or ".join(f"{name} or {name}-..." for name in who.names)
                return f"this key is for peers called {names}, not {peer}"
            # A host "gpu" must not take the names of the host "gpu-7".
            closer = next((other for other in self._named if other.owns(peer) and _closer(other, who)), None)
            return f"the name {peer} belongs to the key {closer.name}" if closer else ""
        for role in ROLES:
            if role != who.role and Principal(role, role).owns(peer):
                return f"the name {peer} belongs to the role {role}"
        owner = next((other for other in self._named if other.owns(peer)), None)
        return f"the name {peer} belongs to the key {owner.name}" if owner else ""


def _closer(one: Principal, other: Principal) -> bool:
    """Return whether a key is for fewer names than another one: its names go on where the other's end."""
    return len(one.names[0].partition("-")[2]) > len(other.names[0].partition("-")[2])


def signature(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return a value that changes whenever a public key in the folder changes.

    Raises:
        OSError: the folder cannot be read.
    """
    with os.scandir(folder) as entries:
        public = [entry for entry in entries if entry.name.endswith(".pub")]
        return tuple(sorted((e.name, (s := e.stat()).st_mtime_ns, s.st_ino) for e in public))


# --- reading ------------------------------------------------------------------------------------------------


def key_pair(folder: Path, role: KeyRole, peer: str = "") -> KeyPair:
    """Read the key pair of a peer: the pair of its own name if there is one, else that of its host, else of its role.

    Raises:
        KeysUnusable: there is none, others can read it, or its halves do not belong together.
    """
    name = _best(folder, role, peer, ".secret")
    path = folder / f"{name}.secret"
    kinds = (role, HOST) if role in OF_HOST else (role,)
    named = sorted(p.stem for kind in kinds for p in folder.glob(f"{kind}-*.secret"))
    if not path.exists() and named:
        its = next(its for its in principal(named[0]).names if its.startswith(role))
        raise KeysUnusable(
            f"{folder} has no key for {peer or role}: the one in {named[0]}.secret is for peers called {its} or "
            f"{its}-...; give it such a name (--name {its}-0), or make it a key of its own"
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
    """Read the public key of a peer to connect to: the key of its own name if there is one, else of its role.

    Raises:
        KeysUnusable: there is none.
    """
    return read_key(folder / f"{_best(folder, role, peer, '.pub')}.pub")


def _best(folder: Path, role: KeyRole, peer: str, suffix: str) -> str:
    """Return the name of the key that fits a peer best: the longest one that exists, or the role.

    Of keys that are equally long, the one of the peer's own role comes before the one of its host.
    """
    parts = peer.split("-") if peer.startswith(f"{role}-") else []
    kinds = (role, HOST) if role in OF_HOST else (role,)
    for end in range(len(parts), 1, -1):
        for kind in kinds:
            name = "-".join([kind, *parts[1:end]])
            if _NAME.fullmatch(name) and (folder / f"{name}{suffix}").exists():
                return name
    return role


def read_key(path: Path) -> bytes:
    """Read the one key in a file, in Z85.

    Raises:
        KeysUnusable: the file cannot be read, or does not hold a key.
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
