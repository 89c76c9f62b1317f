"""Tells a slow engine from one that hangs: measures its steps, and says how long it may stand still. Pure."""

from dataclasses import dataclass, field

FACTOR = 8.0
"""An engine may stand still for this multiple of the longest step that was seen lately."""
WINDOW_S = 300.0
"""Half of the time that a long step is remembered at least."""


@dataclass
class Pace:
    """How long an engine's steps take.

    A step computes prompt tokens, samples tokens, or both. An engine with work makes progress if it makes
    steps: prompts can take many steps before the first token is sampled. The longest step seen in the last
    five to ten minutes decides how long the next one may take, so a large model on a slow machine is not
    taken for an engine that hangs.

    Args:
        now: monotonic seconds.
        least_s: the engine may always stand still for this time.
        full_step_s: time of the largest step, measured at the start; 0 if it is not known.

    Example:
        >>> pace = Pace(now=0.0, least_s=8.0)
        >>> for now in (0.0, 0.5, 1.0):
        ...     pace.look(steps=int(2 * now), running=True, now=now)
        >>> pace.still_s(3.0), pace.patience_s
        (2.0, 8.0)
        >>> pace.look(steps=3, running=True, now=4.0)
        >>> pace.patience_s
        24.0
    """

    now: float
    least_s: float
    full_step_s: float = 0.0
    _steps: int = field(default=0, init=False)
    _moved: float = field(init=False)
    _running: bool = field(default=False, init=False)
    _turned: float = field(init=False)
    _longest: float = field(default=0.0, init=False)
    """Longest step of the current window."""
    _before: float = field(default=0.0, init=False)
    """Longest step of the window before."""

    def __post_init__(self) -> None:
        self._moved = self._turned = self.now

    @property
    def patience_s(self) -> float:
        """Longest time for which the engine may stand still now."""
        return max(self.least_s, FACTOR * max(self.full_step_s, self._longest, self._before))

    def look(self, *, steps: int, running: bool, now: float) -> None:
        """Note how many steps the engine has made, and whether it has work."""
        if now - self._turned > WINDOW_S:
            self._turned, self._before, self._longest = now, self._longest, 0.0
        if steps != self._steps:
            # Time without work before the step is not the step's.
            if self._running:
                self._longest = max(self._longest, now - self._moved)
            self._steps, self._moved = steps, now
        elif not running or not self._running:
            self._moved = now
        self._running = running

    def excuse(self, now: float) -> None:
        """Start the clock anew, because the engine could make no step: it loaded weights."""
        self._moved = now

    def still_s(self, now: float) -> float:
        """Return the seconds that the engine has had work without a step."""
        return now - self._moved if self._running else 0.0
