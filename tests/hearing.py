"""What a role says, for tests that are its peers."""

from protocol.codec import decode
from protocol.envelopes import open_envelope


def heard(frames):
    """The messages of one multipart message, and the frames behind them."""
    said = [decode(one) for one in open_envelope(frames)]
    return [message for message, _ in said], said[-1][1]
