"""Errors of the broker process.

BrokerError
└── BindRefused   an address that cannot or must not be listened on
"""


class BrokerError(Exception):
    """Base of what can end the broker."""


class BindRefused(BrokerError, OSError):
    """An address that cannot or must not be listened on; the text names the setting and the cure."""
