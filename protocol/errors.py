"""Errors of the wire.

ProtocolError
├── VersionMismatch   the peer speaks another major version of the protocol
├── LimitExceeded     a message is larger than the agreed limits (checked before decoding)
├── Malformed         bytes that are not a message of this protocol
└── LinkDown          the other side did not answer within the deadline

AddressRefused        an address that other hosts can reach, without a token or keys that keep strangers out (final)
KeysUnusable          a keys folder lacks what is needed of it, or holds something else (final)
WeightsError          weights that must not be loaded

``final`` says that a new start of the process would only repeat the error, see `launch.exit_codes`.
"""

from typing import ClassVar


class ProtocolError(Exception):
    """Base of everything that can go wrong between two processes; ``code`` is what a refusal says of it."""

    code = "malformed"


class VersionMismatch(ProtocolError):
    """The peer speaks another major version."""

    code = "version"


class LimitExceeded(ProtocolError, ValueError):
    """A message breaks a size limit; it was not decoded."""

    code = "limit"


class Malformed(ProtocolError, ValueError):
    """Bytes that are not a message of this protocol; the text carries the path to the culprit."""


class LinkDown(ProtocolError, ConnectionError):
    """The other side did not answer within the deadline."""


class AddressRefused(ValueError):
    """An address that a server must not listen on; the text names the cure."""

    final: ClassVar[bool] = True


class KeysUnusable(Exception):
    """A keys folder lacks what is needed of it, or holds something else; the text names the file and the cure."""

    final: ClassVar[bool] = True


class WeightsError(ValueError):
    """Weights that must not be loaded; the text names the tensor, what was expected and what was found."""
