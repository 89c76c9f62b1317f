"""Errors of the broker process.

BrokerError
├── BindRefused    an address that cannot be listened on
├── JournalError   the journal cannot be used (final)
├── NameInUse      a peer's name belongs to another process that is connected
├── WrongKey       a message came with a key that is not good for it
├── TryLater       something is there, and cannot be read just now
└── StateBroken    an event could not be applied; the process has to start again from its journal

``final`` says that a new start of the process would only repeat the error, see `launch.exit_codes`.
"""

from typing import ClassVar


class BrokerError(Exception):
    """Base of what can go wrong in the broker."""


class BindRefused(BrokerError, OSError):
    """An address that cannot be listened on, because it is taken or not of this host; the text names the cure.

    Not final, because a port may be free again.
    """


class JournalError(BrokerError):
    """The journal cannot be used; the text names file, place and cure."""

    final: ClassVar[bool] = True


class NameInUse(BrokerError):
    """A name is not given away while the process that has it is connected and heard; the text says so."""


class WrongKey(BrokerError):
    """A message must not be handled because of the key it came with; the text says why."""


class TryLater(BrokerError):
    """The machine has no descriptors or memory for it now; nothing is lost."""


class StateBroken(BrokerError):
    """A fault of the broker in the middle of a change; the text names the event."""
