"""Errors of the broker process.

BrokerError
├── BindRefused    the broker cannot listen on an address
├── JournalError   the journal cannot be used (final)
├── NameInUse      a peer's name belongs to another connected process
├── WrongKey       the key of a message does not permit the message
├── TryLater       something exists, but cannot be read now
└── StateBroken    an event could not be applied; the process must restart from its journal

``final`` marks an error that a restart of the process would only repeat, see `launch.errors`.
"""

from typing import ClassVar


class BrokerError(Exception):
    """Base class of the broker's errors."""


class BindRefused(BrokerError, OSError):
    """The broker cannot listen on an address, because it is taken or does not belong to this host.

    The text names the cure. Not final, because the port may become free.
    """


class JournalError(BrokerError):
    """The journal cannot be used; the text names the file, the place and the cure."""

    final: ClassVar[bool] = True


class NameInUse(BrokerError):
    """A peer asks for a name whose holder is connected and still heard; the text says so."""


class WrongKey(BrokerError):
    """The key of a message does not permit the message; the text says why."""


class TryLater(BrokerError):
    """The machine lacks file descriptors or memory for a read now; nothing is lost."""


class StateBroken(BrokerError):
    """A fault of the broker interrupted a change of its state; the text names the event."""
