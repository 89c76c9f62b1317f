"""One logging set-up for every process."""

import logging
import os
import sys

LEVEL = "OFFBEAT_LOG_LEVEL"
"""Environment variable: `debug` tells of every acknowledgement, too."""


class OneRecord(logging.Formatter):
    """Text of peers and models in a message cannot pass for other lines of the log, nor command a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return plain(super().formatMessage(record)).replace("\n", "\n    ")


def plain(text: str) -> str:
    """Text without control characters, but for the ends of lines.

    Example:
        >>> plain("a\\x1b[2Jb\\nc")
        'a?[2Jb\\nc'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def configure(role: str) -> None:
    """Lines with time, level, role, module; to standard error, which the supervisor keeps in a file per process."""
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
