"""Checks of the files in a keys folder: they must be readable here, and other users must not misuse them."""

import stat
from pathlib import Path

from protocol.errors import KeysUnusable


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
