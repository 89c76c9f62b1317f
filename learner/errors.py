"""Errors of the learner.

LearnerError
├── NoData              nothing to train on arrived in time, or no word from the broker (final)
├── BrokerRefused       the broker refused something the run cannot go on without (final)
├── BrokenTrajectory    segments that do not make a trajectory
├── LedgerViolation     action tokens were lost or counted twice
├── StaleTokens         a token older than the bound was about to carry gradient (final)
├── Diverged            too many steps in a row were not finite (final)
├── CheckpointError     a checkpoint cannot be continued from (final)
├── OpenStateError      stored open trajectories cannot be read
├── ReplayStateError    a stored replay table cannot be continued from (final)
├── ReplayConfigError   replay settings that cannot do what they ask for (final)
└── CannotRetrain       what was recorded cannot be trained again

Stopped                 the run was asked to end; not an error

``final`` says that a new start of the process would only repeat the error, see `launch.exit_codes`.
"""

from typing import ClassVar


class LearnerError(Exception):
    """Base of what goes wrong in a learner."""


class NoData(LearnerError, RuntimeError):
    """Nothing to train on arrived within the deadline, or no word from the broker."""

    final: ClassVar[bool] = True


class BrokerRefused(LearnerError, RuntimeError):
    """The broker refused something the run cannot go on without."""

    final: ClassVar[bool] = True


class BrokenTrajectory(LearnerError, ValueError):
    """Segments that do not make a trajectory; the text names the trajectory and what is wrong with it."""


class LedgerViolation(LearnerError, RuntimeError):
    """Action tokens were lost or counted twice; the text says how many, and where the others are."""


class StaleTokens(LearnerError, AssertionError):
    """A token older than the bound was about to carry gradient: a fault of ours, not of the data."""

    final: ClassVar[bool] = True


class Diverged(LearnerError, RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""

    final: ClassVar[bool] = True


class CheckpointError(LearnerError, RuntimeError):
    """A checkpoint cannot be continued from; the text says why and what to do."""

    final: ClassVar[bool] = True


class OpenStateError(LearnerError, RuntimeError):
    """Stored open trajectories cannot be read; the text says why and what to do."""


class ReplayStateError(LearnerError, RuntimeError):
    """A stored replay table cannot be continued from; the text says why and what to do."""

    final: ClassVar[bool] = True


class ReplayConfigError(LearnerError, ValueError):
    """Settings under which nothing would be replayed, or not as much as asked for; the text names the cure."""

    final: ClassVar[bool] = True


class CannotRetrain(LearnerError, RuntimeError):
    """What was recorded cannot be trained again; the text says why."""


class Stopped(Exception):
    """The run was asked to end; the text says by what (SIGTERM, time limit, drain)."""
