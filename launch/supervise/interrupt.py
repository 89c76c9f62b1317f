"""Turns the signals that end a run into an orderly stop."""

import signal
from types import FrameType

WORDS: dict[int, str] = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP (its terminal closed)",
}
"""Names of the signals that end a run, for people."""


class Interrupt:
    """Turns the first SIGINT, SIGTERM or SIGHUP into an orderly stop; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        self.again = False
        """True after the second signal. Further ones are ignored."""
        self.word = ""
        """Name of the first signal for people; "" before it."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._signal)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        if self.again:
            return
        if self.asked:
            self.again = True
            raise KeyboardInterrupt
        self.asked, self.word = True, WORDS.get(number, "a signal")
