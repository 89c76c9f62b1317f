"""Errors of actors and generators.

ActorError
├── PrefixBroken       the tokens of the next prompt do not begin with the tokens so far
├── TemplateUnusable   the model folder has no usable tokenizer or chat template
└── GenerationFailed   no generator continued the turn
    └── NoGenerator    none was known within the deadline

EndpointRefused        an address that a generator must not listen on
"""


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


class EndpointRefused(ValueError):
    """An address that a generator must not listen on; the text names the cure."""
