"""Files that are either there as a whole or not at all.

A file is written under a temporary name in the same folder, synced to the disk, and renamed. After a crash
the file has the old content or the new content; with ``durable``, also after a power failure.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(
    path: Path, content: bytes | str, *, mode: int = 0o666, durable: bool = True, shared: bool = False
) -> None:
    """Write or replace a file.

    Args:
        content: text is written as UTF-8.
        mode: permissions of the new file, less the process's umask.
        durable: sync the content and the name to the disk.
        shared: several processes may write this file at the same time.

    Raises:
        OSError: the file could not be written; the old file is unchanged.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "epoch"
        >>> write_whole(path, "3")
        >>> path.read_text(), [file.name for file in path.parent.iterdir()]
        ('3', ['epoch'])
    """
    with whole_file(path, durable=durable, shared=shared) as partial:
        # O_EXCL, so that an existing file or link of this name is never written to.
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_file(path: Path, *, durable: bool = True, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to the file's name when the block ends.

    If the block ends with an exception, the temporary file is removed.

    Args:
        durable: sync the content and the name to the disk.
        shared: several processes may write this file at the same time.
    """
    unique = f"-{os.getpid()}-{secrets.token_hex(4)}" if shared else ""
    partial = path.with_name(f"{path.name}.partial{unique}")
    try:
        yield partial
        if durable:
            sync_file(partial)
        partial.replace(path)
        if durable:
            sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync_file(path: Path) -> None:
    """Sync the content of a file to the disk; the content of a folder is the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_folder = sync_file
"""Sync names that were created or changed in a folder to the disk."""
