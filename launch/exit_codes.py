"""What a role's exit code tells the supervisor: whether another start could help."""

from pathlib import Path

DONE = 0
FAILED = 1
"""An error that may not come again: a lost connection, memory, a library. Python's own code for an exception."""
FINAL = 65
"""An error that a new start would only repeat: a wrong setting, a diverged run, books that do not add up."""

FINAL_ERRORS = frozenset(
    {
        "launch.errors.ConfigError",
        "broker.journal.records.JournalError",
        "learner.checkpoint.CheckpointError",
        "learner.intake.exchange.BrokerRefused",
        "learner.intake.exchange.NoData",
        "learner.nonfinite.Diverged",
        "learner.algorithms.staleness.StaleTokens",
        "learner.replay.file.ReplayStateError",
        "learner.replay.rules.ReplayConfigError",
        "actors.errors.EndpointRefused",
        "protocol.errors.AddressRefused",
        "protocol.errors.KeysUnusable",
        "envs.errors.UnknownEnv",
        "envs.errors.RefusedFamily",
    }
)
"""By name, so that no role has to import another. `BindRefused` is not among them: a port may be free again."""


def exit_code(error: BaseException) -> int:
    """Code with which a role ends that was ended by ``error``.

    Example:
        >>> from launch.errors import ConfigError
        >>> exit_code(ConfigError("x")), exit_code(OSError("y"))
        (65, 1)
    """
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    return FINAL if names & FINAL_ERRORS else FAILED


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
