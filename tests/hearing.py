"""Decoding of a role's messages, for tests that act as its peers."""

from protocol.codec import decode, open_envelope


def heard(frames):
    """Return the messages in one multipart message, and the body frames of the last."""
    said = [decode(one) for one in open_envelope(frames)]
    return [message for message, _ in said], said[-1][1]
