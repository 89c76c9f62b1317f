"""Set-up of logging, the same for every process."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

STDOUT, STDERR = 1, 2
LEVEL = "OFFBEAT_LOG_LEVEL"
"""Environment variable with the log level. `debug` also logs every acknowledgement."""


class OneRecord(logging.Formatter):
    """Formatter that keeps text of peers and models from faking log lines or controlling the terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return plain(super().formatMessage(record)).replace("\n", "\n    ")


def plain(text: str) -> str:
    """Return the text with "?" for each control character except line ends.

    Example:
        >>> plain("a\\x1b[2Jb\\nc")
        'a?[2Jb\\nc'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


@contextlib.contextmanager
def libraries_to_stderr() -> Iterator[None]:
    """Send everything that is written to standard output while the context lasts to standard error.

    A command whose answer is for ``$(...)`` writes it after this context. Libraries print warnings to standard output,
    from Python, from C and from processes that they start, and keep handlers that they make here.
    """
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)


def configure(role: str) -> None:
    """Log lines with time, level, role and module to standard error, which the supervisor keeps in a file."""
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL, "info").upper(), logging.INFO)
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        force=True,
    )
    layout = OneRecord(f"%(asctime)s %(levelname)-7s {role} %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(layout)
    logging.captureWarnings(True)
