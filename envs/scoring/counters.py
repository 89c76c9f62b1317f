"""Counts of what went wrong in scoring, and the gauges that report them."""

from dataclasses import dataclass

from protocol.gauges import Gauge, table


@dataclass
class ScorerCounters:
    """Counts of scoring failures and of restarts, for `/status`. An answer whose scoring fails scores 0."""

    scorer_timeouts: int = 0
    scorer_errors: int = 0
    scorer_restarts: int = 0
    scorer_tampered: int = 0


GAUGES = table(
    [
        Gauge(
            "scorer_timeouts_total",
            "answers",
            "answers whose scoring hit the time limit, and scored 0",
            "total",
        ),
        Gauge("scorer_errors_total", "answers", "answers whose scoring failed, and scored 0", "total"),
        Gauge("scorer_restarts_total", "restarts", "scorer processes that were started again", "total"),
        Gauge(
            "scorer_tampered_total",
            "scorers",
            "scorer processes that gave canary answers wrong scores, and were started again",
            "total",
        ),
    ]
)
"""Gauges that a suite with a scorer reports; `ScorerCounters` counts them."""
