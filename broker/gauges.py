"""The broker's own gauges: what is held, what is under way, and what became of every token."""

from typing import get_args

from broker.core.records import Outcome
from protocol.gauges import Gauge, table

OUTCOMES: dict[Outcome, str] = {
    "trained": "tokens that entered a gradient",
    "dropped": "tokens that the learner filtered out or evaluated",
    "stale": "tokens that were too old when their delivery was due",
    "superseded": "tokens of attempts, or lineages, whose place others took",
    "late": "tokens of trajectories that missed their group's deadline",
    "given_up": "tokens of groups of which too few members ended",
    "too_large": "tokens of units too large for a message",
    "poison": "tokens of units that several learner processes did not survive",
    "damaged": "tokens of units whose bytes in the journal cannot be read any more",
}
"""What each outcome of a token means."""
assert set(OUTCOMES) == set(get_args(Outcome))

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
"""Shown as ``broker/name``."""
