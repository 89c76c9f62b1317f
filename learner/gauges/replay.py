"""Metrics of the replay table."""

from protocol.gauges import Gauge, table

REPLAY = table(
    [
        Gauge("replay/items", "items", "items in the replay table"),
        Gauge("replay/inserted", "items", "items inserted so far"),
        Gauge("replay/sampled", "items", "items drawn so far"),
        Gauge("replay/evicted", "items", "items thrown away so far"),
        Gauge("replay/share", "share", "share of the batch's trajectories that were replayed"),
        Gauge("replay/age_mean_versions", "versions", "mean lag of replayed tokens"),
    ]
)
"""Metrics of the replay table."""
