"""Set-up of logging, the same for every process."""

import logging
import os
import sys

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
