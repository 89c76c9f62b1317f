"""One logging set-up for every process."""

import logging
import sys


def configure(role: str, level: int = logging.INFO) -> None:
    """Lines with time, level, role, module; to standard error, which the supervisor keeps in a file per process."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format=f"%(asctime)s %(levelname)-7s {role} %(name)s: %(message)s",
        force=True,
    )
    logging.captureWarnings(True)
