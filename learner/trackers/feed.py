"""The queue and the thread between the learner and one tracker: a tracker that fails or hangs never stops training.

`Feed` decides, without clocks and threads; `FedSink` runs it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from learner.samples import escaped
from learner.trackers.sink import Record, Sink, Text

log = logging.getLogger(__name__)

MAX_RECORDS = 1_000
"""Records that wait for a tracker at most. Behind it the oldest one is dropped, because the newest ones say most."""
RETRY_S = 60.0
"""Seconds between two attempts to open a tracker."""
HANG_S = 120.0
"""Seconds in one call of a tracker after which a line says so."""
CLOSE_S = 60.0
"""Seconds that a tracker has at the end of the run to write what waits."""
IDLE_S = 60.0
"""Longest sleep of a tracker's thread."""
ERROR_CHARS = 300
"""Most characters of a tracker's own words in the log."""

Step = Record | Literal["open", "close", "sleep", "end"]
"""What the thread of a tracker does next; "end" leaves the tracker as it is."""


@dataclass
class Feed:
    """Decides what a tracker's thread does, and what is said of it. Times are of any monotonic clock, in seconds.

    Example:
        >>> feed = Feed("wandb", size=1)
        >>> feed.next(0.0)
        'open'
        >>> feed.failed(ConnectionError("no route"), 0.0)
        'tracker wandb cannot be opened, the run tries again each 60 s and goes on: ConnectionError: no route'
        >>> feed.offer(Text(1, 0.0, "notes", "a"), 1.0), feed.next(1.0), feed.next(60.0)
        ('', 'sleep', 'open')
        >>> feed.done()
        >>> feed.next(61.0)
        Text(step=1, at=0.0, name='notes', markdown='a')
    """

    name: str
    size: int = MAX_RECORDS
    waiting: deque[Record] = field(default_factory=deque)
    written: int = 0
    """Records that the tracker has taken."""
    lost: int = 0
    """Records that the tracker did not take, or that had no room."""
    opened: bool = False
    closing: bool = False
    _doing: Step = "sleep"
    _since: float = 0.0
    _retry_at: float = 0.0
    _said: set[str] = field(default_factory=set)

    def offer(self, record: Record, now: float) -> str:
        """Take a record. Return a sentence for the log, or ""."""
        self.waiting.append(record)
        if len(self.waiting) > self.size:
            self.waiting.popleft()
            self.lost += 1
            return self._once("full", f"is {self.size} records behind; the oldest ones are lost")
        if self._doing != "sleep" and now - self._since > HANG_S:
            return self._once("hangs", f"has not answered for {HANG_S:g} s; the run goes on")
        return ""

    def next(self, now: float) -> Step:
        """Return what the thread does now."""
        self._doing, self._since = self._due(now), now
        return self._doing

    def _due(self, now: float) -> Step:
        if not self.opened:
            if now >= self._retry_at:
                return "open"
            return "end" if self.closing else "sleep"
        if self.waiting:
            return self.waiting.popleft()
        return "close" if self.closing else "sleep"

    def sleep_s(self, now: float) -> float:
        """Return for how long the thread may sleep, in seconds."""
        return IDLE_S if self.opened else min(IDLE_S, max(0.0, self._retry_at - now))

    def done(self) -> None:
        """Note that the tracker did what `next` returned."""
        if self._doing == "open":
            self.opened = True
        elif not isinstance(self._doing, str):
            self.written += 1
        self._doing = "sleep"

    def failed(self, error: BaseException, now: float) -> str:
        """Note that the tracker raised. Return a sentence for the log, or "" if it was said before."""
        what, self._doing = self._doing, "sleep"
        why = escaped(f"{type(error).__name__}: {error}".strip().splitlines()[0][:ERROR_CHARS])
        if what == "open":
            self._retry_at = now + RETRY_S
            return self._once(
                "closed",
                f"cannot be opened, the run tries again each {RETRY_S:g} s and goes on: {why}",
            )
        self.lost += not isinstance(what, str)
        return self._once("failed", f"failed, and what it did not take is lost: {why}")

    def end(self, *, abandoned: bool) -> str:
        """Count what is left as lost. Return what became of the tracker's records if some are lost, or "".

        Args:
            abandoned: whether the tracker is still in a call.
        """
        self.lost += len(self.waiting) + (abandoned and not isinstance(self._doing, str))
        self.waiting.clear()
        hangs = f", and it did not end within {CLOSE_S:g} s" if abandoned else ""
        if not self.lost and not abandoned:
            return ""
        return f"tracker {self.name}: {self.written} records written, {self.lost} lost{hangs}"

    def _once(self, kind: str, text: str) -> str:
        if kind in self._said:
            return ""
        self._said.add(kind)
        return f"tracker {self.name} {text}"


class FedSink:
    """Feeds a tracker from a thread. No call waits for the tracker, except `close`, for `CLOSE_S` at most.

    Args:
        name: name of the tracker.
        open_sink: opens the tracker; called in the thread, and again later if it raises.
        size: most records that wait.
        close_s: seconds that the tracker has at the end.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        *,
        size: int = MAX_RECORDS,
        close_s: float = CLOSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open, self._clock, self._close_s = open_sink, clock, close_s
        self._sink: Sink | None = None
        self._failed_run = False
        # Invariant: the learner's thread and the tracker's read and change the feed only while they hold this lock; no
        # call of the tracker is made under it.
        self._changed = threading.Condition()
        self._feed = Feed(name, size)
        self.abandoned = False
        """True if the tracker was still in a call at the end."""
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Name of the tracker."""
        return self._feed.name

    @property
    def lost(self) -> int:
        """Records that the tracker did not take so far."""
        with self._changed:
            return self._feed.lost

    def write(self, record: Record) -> None:
        """Hand a record to the thread."""
        with self._changed:
            said = self._feed.offer(record, self._clock())
            self._changed.notify()
        _say(said)

    def rewind(self, step: int) -> None:
        """Note at the tracker that later steps are done again: its records cannot be taken back."""
        self.write(Text(step, time.time(), "notes", f"the run goes on from the checkpoint of step {step}"))

    def close(self, *, failed: bool) -> None:
        """Let the thread write what waits, and end it, or leave it where it hangs."""
        with self._changed:
            self._failed_run, self._feed.closing = failed, True
            self._changed.notify()
        self._thread.join(self._close_s)
        with self._changed:
            self.abandoned = self._thread.is_alive()
            said = self._feed.end(abandoned=self.abandoned)
        _say(said)

    def _run(self) -> None:
        while True:
            with self._changed:
                step = self._feed.next(self._clock())
                if step == "sleep":
                    self._changed.wait(self._feed.sleep_s(self._clock()))
                    continue
            if step == "end":
                return
            said = ""
            try:
                self._do(step)
            # A tracker's package may try to end the process: it ends nothing but its own call.
            except (Exception, SystemExit) as error:
                with self._changed:
                    said = self._feed.failed(error, self._clock())
            else:
                with self._changed:
                    self._feed.done()
            _say(said)
            if step == "close":
                return

    def _do(self, step: Step) -> None:
        if step == "open":
            self._sink = self._open()
            return
        assert self._sink is not None
        if step == "close":
            self._sink.close(failed=self._failed_run)
        elif not isinstance(step, str):
            self._sink.write(step)


def _say(text: str) -> None:
    if text:
        log.warning("%s", text)
