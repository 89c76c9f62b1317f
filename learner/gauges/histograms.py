"""Histograms of a learner step."""

from protocol.gauges import Gauge, table

HISTOGRAMS = table(
    [
        Gauge("return_generated", "reward", "returns of the trajectories that arrived, without failed ones"),
        Gauge(
            "advantage_trained",
            "reward",
            "mean advantage of each trajectory that carried gradient in the step",
        ),
        Gauge(
            "reward/NAME",
            "reward",
            "each reward of the trajectories that arrived; absent if the environment gives only one",
        ),
        Gauge("policy_lag_versions", "versions", "lag of trained tokens"),
        Gauge("length_generated_tokens", "tokens", "action tokens of the trajectories that arrived"),
        Gauge("length_trained_tokens", "tokens", "action tokens of the trajectories trained"),
        Gauge("ratio_proximal_behaviour", "ratio", "importance ratio proximal/behaviour of trained tokens"),
        Gauge("ratio_current_proximal", "ratio", "importance ratio current/proximal of trained tokens"),
    ]
)
"""Histograms, shown as ``histogram/name``."""
