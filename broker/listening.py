"""Limit of the kernel that the broker raises before it listens."""

import contextlib
import resource


def allow_many_connections() -> None:
    """Raise the limit of open files as far as allowed, because each connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        # The kernel may have a lower limit of its own, which it enforces with an error.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
