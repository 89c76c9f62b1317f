"""The broker's own gauges: what is held, what is under way, and the outcome of every token."""

from broker.core.ledger import OUTCOMES
from protocol.gauges import Gauge, table

BROKER = table(
    [
        Gauge("queue_depth_segments", "segments", "segments held for the learner"),
        Gauge("queued_bytes", "bytes", "bytes of the segments held for the learner"),
        Gauge("tasks_queued", "tasks", "tasks that wait for an actor"),
        Gauge("tasks_leased", "tasks", "tasks under way"),
        Gauge("units_ready", "units", "units ready for delivery"),
        Gauge("units_leased", "units", "units that the learner has"),
        Gauge("units_committed", "units", "units that are committed and in no checkpoint yet"),
        Gauge("journal_aside_bytes", "bytes", "bytes of the committed units in the journal"),
        Gauge("ledger_stored_tokens", "tokens", "tokens stored since the run began", "total"),
        Gauge("ledger_held_tokens", "tokens", "stored tokens that have no outcome yet"),
        Gauge(
            "ledger_rolled_back_tokens",
            "tokens",
            "tokens that came back because no checkpoint covered them",
            "total",
        ),
        *(
            Gauge(f"ledger_{outcome}_tokens", "tokens", meaning, "total")
            for outcome, meaning in OUTCOMES.items()
        ),
        Gauge(
            "length_bias_tokens", "tokens", "mean length of trained trajectories minus that of all that ended"
        ),
        Gauge(
            "length_distance_tokens",
            "tokens",
            "Wasserstein-1 distance between the lengths of trained trajectories and of all that ended",
        ),
    ]
)
"""Gauges of the broker; metrics show them as ``broker/name``."""
