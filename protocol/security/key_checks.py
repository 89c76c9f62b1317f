"""What is asked of every file in a keys folder: that it is there, and that nobody else can do harm by it."""

import stat
from pathlib import Path

from protocol.errors import KeysUnusable


def refuse_open_secret(path: Path, mode: int) -> None:
    """Raise KeysUnusable if others can read or change a secret; ``mode`` as `os.stat` has it."""
    if mode & 0o027:
        raise KeysUnusable(
            f"{path}: mode {stat.S_IMODE(mode):o} lets others read or change it; do `chmod 600 {path}`"
        )


def refuse_changeable(path: Path, mode: int) -> None:
    """Raise KeysUnusable if others can change what everybody may read."""
    if mode & 0o022:
        raise KeysUnusable(
            f"{path}: mode {stat.S_IMODE(mode):o} lets others change it; do `chmod go-w {path}`"
        )


def unreadable(path: Path, error: OSError) -> KeysUnusable:
    """What to raise where a file of HTTP cannot be read."""
    return KeysUnusable(
        f"{path}: cannot be read ({error.strerror}); make it with `offbeat keys make {path.parent}`, or copy the keys "
        "folder of the run to this host"
    )
