"""Files that are either there as a whole or not at all.

A file is written beside its place, brought to the disk, and renamed. After a crash the old content is there, or the
new one; with ``durable``, after a power failure, too.
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
        durable: also have the disk take the content and the name.
        shared: several processes may write this file at the same time.

    Raises:
        OSError: the file could not be written; what was there before is untouched.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "epoch"
        >>> write_whole(path, "3")
        >>> path.read_text(), [file.name for file in path.parent.iterdir()]
        ('3', ['epoch'])
    """
    with whole_file(path, durable=durable, shared=shared) as partial:
        # O_EXCL: nobody else's file of that name, and no link, is written to.
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_file(path: Path, *, durable: bool = True, shared: bool = False) -> Iterator[Path]:
    """Yield the path to write to; the file gets its name when the block ends well, else it is removed.

    Args:
        durable: also have the disk take the content and the name.
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
    """Have the disk take a file's content.

    A folder's content are the names in it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_folder = sync_file
"""Have the disk take names that were made or changed in a folder."""
