"""Errors of actors and generators.

ActorError
├── PrefixBroken       the tokens of the next prompt do not begin with the tokens so far
├── TemplateUnusable   the model folder has no usable tokenizer or chat template
└── GenerationFailed   no generator continued the turn
    └── NoGenerator    none was known within the deadline

GeneratorError
├── RequestRefused     one request cannot be served; the engine is well
├── UpdateRefused      an engine cannot take these weights; it serves on
├── EngineFailed       nothing sampled from this engine may be used any more
├── GeneratorFailed    this process must not go on; its successor may
├── NoRoom             there is no memory for a version
├── SourceFailed       this source of weights cannot be used now; another one may
│   └── WrongBytes     it sends something else than its manifest says
└── Cancelled          a fetch is given up because this process ends
"""

from protocol.errors import WeightsError


class ActorError(Exception):
    """Base of what goes wrong in an actor."""


class PrefixBroken(ActorError, ValueError):
    """The tokens of the next prompt do not begin with the tokens so far; the text shows where they part."""


class TemplateUnusable(ActorError, ValueError):
    """The model folder has no usable tokenizer or chat template; the text names the file."""


class GenerationFailed(ActorError, RuntimeError):
    """No generator continued the turn; the text says what each attempt met."""


class NoGenerator(GenerationFailed):
    """No generator was known within the deadline."""


class GeneratorError(Exception):
    """Base of what goes wrong in a generator."""


class RequestRefused(GeneratorError, ValueError):
    """One request cannot be served; the text says what is wrong with it. The engine is well."""


class UpdateRefused(GeneratorError, ValueError):
    """An engine cannot take these weights; it is untouched and serves on."""


class EngineFailed(GeneratorError, RuntimeError):
    """Nothing sampled from this engine may be used any more; its process has to be replaced."""


class GeneratorFailed(GeneratorError, RuntimeError):
    """This process must not go on; its successor may."""


class NoRoom(GeneratorError, WeightsError):
    """The memory for a version cannot be had."""


class SourceFailed(GeneratorError):
    """A source of weights cannot be used now; another one may."""


class WrongBytes(SourceFailed):
    """A source of weights sends something else than its manifest says."""


class Cancelled(GeneratorError):
    """A fetch is given up because this process ends."""
