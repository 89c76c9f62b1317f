"""What a role's exit code tells the supervisor: whether another start could help."""

from pathlib import Path

DONE = 0
FAILED = 1
"""An error that may not come again: a lost connection, memory, a library. Python's own code for an exception."""
FINAL = 65
"""An error that a new start would only repeat: a wrong setting, a diverged run, books that do not add up."""


def exit_code(error: BaseException) -> int:
    """Return the code with which a role ends because of ``error``: its class says whether it is final.

    Example:
        >>> from launch.errors import ConfigError
        >>> exit_code(ConfigError("x")), exit_code(OSError("y"))
        (65, 1)
    """
    return FINAL if getattr(error, "final", False) else FAILED


def leave_note(folder: Path, name: str, code: int) -> None:
    """Keep the code where `read_note` finds it: torchrun ends with 1, whatever its ranks ended with."""
    (folder / f"{name}.exit").write_text(str(code))


def read_note(folder: Path, name: str) -> int | None:
    """Code that a role has left, if it got so far."""
    try:
        return int((folder / f"{name}.exit").read_text())
    except (OSError, ValueError):
        return None


def clear_note(folder: Path, name: str) -> None:
    """Forget the code of the process before."""
    (folder / f"{name}.exit").unlink(missing_ok=True)
