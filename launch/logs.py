"""One logging set-up for every process."""

import logging
import os
import sys

LEVEL = "OFFBEAT_LOG_LEVEL"
"""Environment variable: `debug` tells of every acknowledgement, too."""


def configure(role: str) -> None:
    """Lines with time, level, role, module; to standard error, which the supervisor keeps in a file per process."""
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL, "info").upper(), logging.INFO)
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format=f"%(asctime)s %(levelname)-7s {role} %(name)s: %(message)s",
        force=True,
    )
    logging.captureWarnings(True)
