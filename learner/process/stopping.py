"""The reason why a learner process should end, and its end."""

import logging
import os
import signal
import time
from types import FrameType
from typing import NoReturn

from learner.intake.broker_wait import TIME_LIMIT


class Stop:
    """The reason why training should end, if there is one: a signal or the time limit."""

    def __init__(self) -> None:
        self._deadline, self._signalled = float("inf"), False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signal)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def ignore(self) -> None:
        """Ignore the signals and leave the decision to rank 0."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def limit(self, minutes: float) -> None:
        """Start the clock of the time limit."""
        self._deadline = time.monotonic() + minutes * 60

    def reason(self) -> str:
        """Return why training should end, or ""."""
        if self._signalled:
            return "SIGTERM"
        return TIME_LIMIT if time.monotonic() > self._deadline else ""


def leave() -> NoReturn:
    """End this process at once: after the use of a process group, torch's threads can abort an orderly
    exit."""
    logging.shutdown()
    os._exit(0)
