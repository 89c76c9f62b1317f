"""Exit codes of the roles, which tell the supervisor whether another start could help."""

from pathlib import Path

DONE = 0
FAILED = 1
"""Error that another start may not repeat, such as a lost connection. Python's own code for an exception."""
FINAL = 65
"""Error that another start would only repeat: a wrong setting, a diverged run, an unusable journal."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a role that ends because of ``error``, whose class says whether it is final.

    Example:
        >>> from launch.errors import ConfigError
        >>> exit_code(ConfigError("x")), exit_code(OSError("y"))
        (65, 1)
    """
    return FINAL if getattr(error, "final", False) else FAILED


def leave_note(folder: Path, name: str, code: int) -> None:
    """Write the code for `read_note`, because torchrun exits with 1 whatever its ranks exited with."""
    (folder / f"{name}.exit").write_text(str(code))


def read_note(folder: Path, name: str) -> int | None:
    """Return the code that a role wrote before it ended, or None if it wrote none."""
    try:
        return int((folder / f"{name}.exit").read_text())
    except (OSError, ValueError):
        return None


def clear_note(folder: Path, name: str) -> None:
    """Remove the code that the previous process wrote."""
    (folder / f"{name}.exit").unlink(missing_ok=True)
