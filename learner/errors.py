"""Errors of the learner.

LearnerError
├── NoData              no training data, or no answer from the broker, within the deadline (final)
├── NothingToLearn      every episode fails, or every group has equal returns (final)
├── BrokerRefused       the broker refused a message that the run needs (final)
├── BrokenTrajectory    segments that do not make a trajectory
├── LedgerViolation     action tokens were lost or counted twice
├── StaleTokens         a token older than the bound was about to carry gradient (final)
├── Diverged            loss or gradient was not finite in too many consecutive steps (final)
├── LoraError           adapters cannot be put into the model (final)
├── TeacherFailed       a teacher's server gave no log-probabilities
├── HostsDiffer         hosts of the learner have different settings or folders (final)
├── RoutesUnknown       the model's choice of experts cannot be replayed (final)
├── SamplerDiffers       generators sample from another policy than the learner computes (final)
├── NoisyModel          the model draws random numbers while it trains (final)
├── GpuKept             generators kept a shared GPU although the learner waited for it
├── ModelUnusable       no generator would take a trained version of the model (final)
├── NotAnnounced        a policy version was copied, but not announced in time
├── CheckpointError     a checkpoint cannot be loaded (final)
├── OpenStateError      stored open trajectories cannot be read
├── ReplayStateError    a stored replay table cannot be loaded (final)
├── ReplayConfigError   replay settings with which nothing, or too little, would be replayed (final)
├── FormulaError        a formula of the user's own cannot be loaded, or returned what cannot be trained (final)
└── CannotRetrain       recorded steps cannot be trained again

Stopped                 the run was asked to end; not an error

``final`` means that a restart of the process would only repeat the error, see `launch.errors`.
"""

from typing import ClassVar


class LearnerError(Exception):
    """Base class of the learner's errors."""


class NoData(LearnerError, RuntimeError):
    """No training data, or no answer from the broker, arrived within the deadline."""

    final: ClassVar[bool] = True


class NothingToLearn(LearnerError, RuntimeError):
    """Every episode fails, or every group has equal returns; the message says why, and names the cure."""

    final: ClassVar[bool] = True


class BrokerRefused(LearnerError, RuntimeError):
    """The broker refused a message that the run needs, for example its tasks."""

    final: ClassVar[bool] = True


class BrokenTrajectory(LearnerError, ValueError):
    """Segments do not make a trajectory; the message names the trajectory and its fault."""


class LedgerViolation(LearnerError, RuntimeError):
    """Action tokens were lost or counted twice; the message says how many, and lists all counts."""


class StaleTokens(LearnerError, AssertionError):
    """A token older than the bound was about to carry gradient: a bug of Offbeat, not a fault of the data."""

    final: ClassVar[bool] = True


class Diverged(LearnerError, RuntimeError):
    """Too many consecutive steps had a loss or gradient that is not finite."""

    final: ClassVar[bool] = True


class LoraError(LearnerError, ValueError):
    """Adapters cannot be put into the model; the message says why, and names the cure."""

    final: ClassVar[bool] = True


class TeacherFailed(LearnerError, RuntimeError):
    """A teacher behind a URL gave no log-probabilities; the message says why, and names the cure."""


class HostsDiffer(LearnerError, RuntimeError):
    """The learner's hosts have different settings, or do not share the run folder; the message names the cure."""

    final: ClassVar[bool] = True


class RoutesUnknown(LearnerError, ValueError):
    """The model's choice of experts cannot be replayed; the message names the layer, and the cure."""

    final: ClassVar[bool] = True


class SamplerDiffers(LearnerError, RuntimeError):
    """Generators sample from another policy than the learner computes; the message names a token, and the cure."""

    final: ClassVar[bool] = True


class NoisyModel(LearnerError, ValueError):
    """The model draws random numbers while it trains, so nothing it computes is what a generator sampled with."""

    final: ClassVar[bool] = True


class GpuKept(LearnerError, TimeoutError):
    """Generators kept a shared GPU although the learner waited for it; the message says what to do."""


class ModelUnusable(LearnerError, ValueError):
    """No generator would take a trained version of the model; the message names the tensor, and the cure."""

    final: ClassVar[bool] = True


class NotAnnounced(LearnerError, RuntimeError):
    """A policy version was copied, but its thread did not announce it in time; the message says what to look at."""


class CheckpointError(LearnerError, RuntimeError):
    """A checkpoint cannot be loaded; the message says why and what to do."""

    final: ClassVar[bool] = True


class OpenStateError(LearnerError, RuntimeError):
    """Stored open trajectories cannot be read; the message says why and what to do."""


class ReplayStateError(LearnerError, RuntimeError):
    """A stored replay table cannot be loaded; the message says why and what to do."""

    final: ClassVar[bool] = True


class ReplayConfigError(LearnerError, ValueError):
    """Settings with which nothing, or less than the share, would be replayed; the message names the cure."""

    final: ClassVar[bool] = True


class FormulaError(LearnerError, ValueError):
    """A formula of the user's own cannot be loaded, or returned what cannot be trained; the text names its place."""

    final: ClassVar[bool] = True


class CannotRetrain(LearnerError, RuntimeError):
    """Recorded steps cannot be trained again; the message says why."""


class Stopped(Exception):
    """The run was asked to end; the message says by what (SIGTERM, time limit, drain)."""
