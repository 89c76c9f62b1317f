"""Errors of the wire.

ProtocolError
├── VersionMismatch   the peer speaks a different major version of the protocol
├── LimitExceeded     a message is larger than the agreed limits (checked before decoding)
├── Malformed         bytes that are not a message of this protocol
└── LinkDown          the other side did not answer within the deadline
    └── NotAdmitted   the broker does not admit this process, and will not admit its next start (final)

AddressRefused        an address that other hosts can reach, without keys that keep strangers out (final)
KeysUnusable          a keys folder lacks a file that is needed, or holds one that cannot be used (final)
GpuUnusable           a process was given GPUs that its libraries cannot compute on (final)
WeightsError          weights that must not be loaded
└── NameTaken         a different user has the name of a file or folder in shared memory (final)

``final`` means that the error would only come again if the process were restarted, see `launch.errors`.
"""

from typing import ClassVar


class ProtocolError(Exception):
    """Base of everything that can go wrong between two processes; ``code`` is the code of the refusal."""

    code = "malformed"


class VersionMismatch(ProtocolError):
    """The peer speaks a different major version of the protocol."""

    code = "version"


class LimitExceeded(ProtocolError, ValueError):
    """A message breaks a size limit; it was not decoded."""

    code = "limit"


class Malformed(ProtocolError, ValueError):
    """Bytes that are not a message of this protocol; the text has the path of the field that is wrong."""


class LinkDown(ProtocolError, ConnectionError):
    """The other side did not answer within the deadline."""


class NotAdmitted(LinkDown):
    """The broker does not admit this process, and will not admit its next start with the same keys and settings.

    Args:
        text: what the broker said.
        code: code of the refusal, or "wrong_run".
    """

    final: ClassVar[bool] = True

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


LASTING = ("wrong_key", "wrong_digest", "wrong_run")
"""Codes of refusals that the next start of a process would get, too."""


class AddressRefused(ValueError):
    """An address that a server must not listen on; the text names the cure."""

    final: ClassVar[bool] = True


class KeysUnusable(Exception):
    """A keys folder lacks a file or holds one that cannot be used; the text names the file and the cure."""

    final: ClassVar[bool] = True


class GpuUnusable(Exception):
    """A process was given GPUs that its libraries cannot compute on; the text says why, and what to look at."""

    final: ClassVar[bool] = True


class WeightsError(ValueError):
    """Weights that must not be loaded; the text names the tensor, what was expected and what was found."""


class NameTaken(WeightsError):
    """A different user has the name of a file or folder in shared memory; the text names both and the cure."""

    final: ClassVar[bool] = True
