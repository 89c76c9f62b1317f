"""Waits for what the broker sends, with a deadline, and tells in heartbeats what the learner waits for."""

import time
from collections.abc import Callable

from learner.config import LearnerConfig
from learner.errors import NoData, Stopped
from learner.intake.broker_connection import BrokerConnection
from learner.intake.intake import Intake
from protocol.sockets import ThreadLink

POLL_S = 0.2
TIME_LIMIT = "time limit"


class BrokerWait:
    """The wait for a batch or an evaluation, of which there is one at a time.

    Args:
        connection: its messages are processed while waiting.
        link: tells whether the broker answers.
        intake: tells what has arrived, and whether anything of it can be trained.
        config: for `start_timeout_s`, `data_timeout_s` and the limits of `SignalWatch`.
        stop_reason: returns why the run was asked to end, or "".
        broker: words that name the broker.
    """

    def __init__(
        self,
        connection: BrokerConnection,
        link: ThreadLink,
        intake: Intake,
        config: LearnerConfig,
        *,
        stop_reason: Callable[[], str],
        broker: str,
    ) -> None:
        self._connection, self._link, self._intake, self._config = connection, link, intake, config
        self._stop_reason, self._broker = stop_reason, broker
        self._patience_s = config.start_timeout_s
        # Invariant: the main thread writes waiting, _since and _wanted; the link's thread reads them in `gauges`.
        self.waiting = False
        """True while `until` waits for the broker."""
        self._since, self._wanted = 0.0, 0

    def until(
        self, done: Callable[[], bool], missing: Callable[[], str], *, limited: bool, wanted: int = 0
    ) -> None:
        """Wait until ``done`` returns True.

        Args:
            done: called after each look at the inbox.
            missing: returns what is missing, for the error message.
            limited: whether the run's time limit ends the wait, and groups with equal returns; SIGTERM and Drain
                always do.
            wanted: units that are waited for; 0: no units are.

        Raises:
            NoData: nothing arrived within the deadline.
            Stopped: the run was asked to end.
        """
        self._wanted = wanted
        self.waiting, self._since = True, time.monotonic()
        try:
            self._connection.pump(0.0)
            heard = time.monotonic()
            while True:
                reason = self.end_reason()
                if reason and (limited or reason != TIME_LIMIT):
                    raise Stopped(reason)
                looked = time.monotonic()
                if done():
                    return
                self._intake.signal.look(self._config, looked, training=limited)
                # Time inside `done`, which may write a checkpoint, does not count as waiting.
                heard += time.monotonic() - looked
                if self._connection.pump(POLL_S):
                    heard, self._patience_s = time.monotonic(), self._config.data_timeout_s
                elif time.monotonic() - heard > self._patience_s:
                    raise NoData(
                        f"nothing arrived for {self._patience_s:g} s: {missing()}; {self._where_to_look()}"
                    )
        finally:
            self.waiting = False
            self._wanted = 0

    def end_reason(self) -> str:
        """Return why the run was asked to end, by the broker or on this host, or ""."""
        return self._connection.drained or self._stop_reason()

    def gauges(self) -> tuple[tuple[str, float], ...]:
        """Return what the learner waits for, and since how many seconds, for its heartbeat."""
        signal = self._intake.signal
        rows: list[tuple[str, float]] = []
        if signal.uniform.length:
            rows = [
                ("uniform_groups_in_a_row", float(signal.uniform.length)),
                ("uniform_return", signal.uniform_return),
            ]
        if not self.waiting:
            return tuple(rows)
        waits = [*rows, ("waiting_seconds", time.monotonic() - self._since)]
        if wanted := self._wanted:
            waits += [("units_here", float(len(self._intake.ready))), ("units_wanted", float(wanted))]
        return tuple(waits)

    def _where_to_look(self) -> str:
        """Return the part of the error that says whom the learner waits for and where to look."""
        if not self._link.session.joined:
            return (
                f"{self._broker} is silent: start it again with its run folder, the learner goes on by itself"
            )
        return (
            f"{self._broker} answers, its /status says who waits for whom; its gauges: {self._intake.gauges}"
        )
