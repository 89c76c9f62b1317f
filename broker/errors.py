"""Errors of the broker process.

BrokerError
├── BindRefused   an address that cannot or must not be listened on
├── TryLater      something is there, and cannot be read just now
└── StateBroken   an event could not be applied; the process has to start again from its journal
"""


class BrokerError(Exception):
    """Base of what can end the broker."""


class BindRefused(BrokerError, OSError):
    """An address that cannot or must not be listened on; the text names the setting and the cure."""


class TryLater(BrokerError):
    """The machine has no descriptors or memory for it now; nothing is lost."""


class StateBroken(BrokerError):
    """A fault of the broker in the middle of a change; the text names the event."""
