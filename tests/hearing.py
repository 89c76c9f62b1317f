"""What the broker says, for tests that are its peers."""

from protocol.codec import decode, split_joined


def heard(frames):
    """The messages of one multipart message, and the frames behind them."""
    said = [decode(one) for one in split_joined(frames)]
    return [message for message, _ in said], said[-1][1]
