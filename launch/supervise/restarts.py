"""Decides when a process that has ended may start again. Pure."""

from dataclasses import dataclass, field

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0


@dataclass(frozen=True)
class Patience:
    """Limits of a row of restarts.

    Args:
        max_restarts: restarts in a row.
        settled_s: a process that has lived this long begins a new row.
    """

    max_restarts: int = 5
    settled_s: float = 60.0


@dataclass
class RestartBackoff:
    """The restarts of one role process.

    The first restart of a row comes at once, the second after `FIRST_DELAY_S`, and each further one after
    twice the previous delay, at most `LONGEST_DELAY_S`.

    Example:
        >>> row, patience = RestartBackoff(), Patience(max_restarts=3, settled_s=60.0)
        >>> [row.ended("killed", lived_s=2.0, now=now, patience=patience) for now in (10.0, 20.0, 30.0, 40.0)]
        [10.0, 21.0, 32.0, None]
        >>> RestartBackoff(in_row=3).ended("killed", lived_s=61.0, now=9.0, patience=patience)
        9.0
    """

    in_row: int = 0
    total: int = 0
    reasons: list[str] = field(default_factory=list)

    def ended(self, why: str, *, lived_s: float, now: float, patience: Patience) -> float | None:
        """Record that the process has ended, and why.

        Return when to start it again, or None if it must not.
        """
        if lived_s >= patience.settled_s:
            self.in_row = 0
        if self.in_row >= patience.max_restarts:
            return None
        delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self.in_row - 1)) if self.in_row else 0.0
        self.in_row += 1
        self.total += 1
        self.reasons.append(why)
        return now + delay
