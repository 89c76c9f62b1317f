"""What the broker asks of the kernel before it listens."""

import contextlib
import resource


def allow_many_connections() -> None:
    """Raise the limit of open files as far as it may be raised: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):  # the kernel has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
