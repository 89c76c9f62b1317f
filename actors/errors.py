"""Errors of actors and generators.

ActorError
├── PrefixBroken       the next prompt does not begin with the tokens of the trajectory so far
├── PrefixDiverged     the environment answered a repeated action in a different way
├── TemplateUnusable   the model folder has no usable tokenizer or chat template
├── TurnRefused        a request to a generator is itself at fault, for example a prompt that is too long
├── EnvironmentFailed  the environment raised an error, took too long, or returned something that is no result
├── TeacherFailed      a teacher gave no answer that can be used; the task does not run again
└── Infrastructure     neither the environment nor the model is at fault; a later attempt may succeed
    ├── GenerationFailed   no generator continued the turn
    │   └── NoGenerator    the broker listed no generator within the deadline
    ├── ServiceDown        a service that a reward needs did not answer
    └── EnvironmentStuck   code of a different task blocks the thread in which environments run

GeneratorError
├── RequestRefused     the engine cannot serve one request, but still works
├── UpdateRefused      the engine cannot take these weights, and goes on with the old ones
├── EngineFailed       nothing sampled from this engine may be used any more
├── ModelNotLoaded     the engine has no way to load this model (final)
├── GeneratorFailed    this process has to end; a new one may work
├── NoRoom             this host has no memory for a version
├── SourceFailed       this source of weights cannot be used now; a different one may work
│   └── WrongBytes     a source sends bytes that do not match what was asked for
└── Cancelled          a fetch stops because this process ends

Orphaned               the run goes on later: broker or learner are gone, or the broker ends (another start helps)
"""

from typing import ClassVar

from protocol.errors import WeightsError


class ActorError(Exception):
    """Base of the errors of actors."""


class PrefixBroken(ActorError, ValueError):
    """The next prompt does not begin with the tokens so far; the message shows the first difference."""


class PrefixDiverged(ActorError, RuntimeError):
    """The environment answered a repeated action in a different way; the message names the turn and the token."""


class TemplateUnusable(ActorError, ValueError):
    """The model folder has no usable tokenizer or chat template; the message names the file."""


class TurnRefused(ActorError, ValueError):
    """A request to a generator is itself at fault; a different generator would refuse it, too."""


class EnvironmentFailed(ActorError, RuntimeError):
    """The environment failed an episode; the message names what it did, with file and line where they are known."""


class TeacherFailed(ActorError, RuntimeError):
    """A teacher gave no answer that can be used; the message names the teacher. The policy is not at fault."""


class Infrastructure(ActorError, RuntimeError):
    """Neither the environment nor the model failed an episode: its task is given back, and runs again."""


class GenerationFailed(Infrastructure):
    """No generator continued the turn; the message says how each attempt failed."""


class NoGenerator(GenerationFailed):
    """The broker listed no generator within the deadline."""


class ServiceDown(Infrastructure):
    """A service that a reward needs did not answer, see `envs.errors.ServiceFailed`."""


class EnvironmentStuck(Infrastructure):
    """The thread in which environments run was blocked by code of a different task, and was left behind."""


class GeneratorError(Exception):
    """Base of the errors of generators."""


class RequestRefused(GeneratorError, ValueError):
    """The engine cannot serve one request, but still works; the message says what is wrong with it."""


class UpdateRefused(GeneratorError, ValueError):
    """An engine cannot take these weights; it is unchanged and goes on with the old ones."""


class EngineFailed(GeneratorError, RuntimeError):
    """Nothing sampled from this engine may be used any more; its process has to be replaced."""


class ModelNotLoaded(GeneratorError, ValueError):
    """The engine has no way to load this model, for example an architecture that it does not know."""

    final: ClassVar[bool] = True


class GeneratorFailed(GeneratorError, RuntimeError):
    """This generator process has to end; a new one may work."""


class NoRoom(GeneratorError, WeightsError):
    """This host has no memory for a version."""


class SourceFailed(GeneratorError):
    """A source of weights cannot be used now; a different one may work."""


class WrongBytes(SourceFailed):
    """A source of weights sends bytes that do not match what was asked for, or their hash."""


class Cancelled(GeneratorError):
    """A fetch stops because this process ends."""


class Orphaned(Exception):
    """An actor or generator leaves a run that goes on later: it has no broker, or no learner, or the broker ends.

    ``again`` says that whoever started the process should start it again, see `launch.errors`.
    """

    again: ClassVar[bool] = True
