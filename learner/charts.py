"""How TensorBoard shows metrics: charts to look at first, an overview that sorts first, tags of histograms."""

from learner.gauges.histograms import HISTOGRAMS
from protocol.gauges import tag

CHARTS: dict[str, tuple[str, ...]] = {
    "reward": ("rollout/return_mean", "rollout/correct_share", "reward/"),
    "held-out": ("evaluation/accuracy", "evaluation/return_mean"),
    "length (tokens)": ("rollout/length_mean_tokens", "rollout/length_trained_mean_tokens"),
    "lag (versions)": ("learner/policy_lag_mean_versions", "learner/policy_lag_max_versions"),
    "idle (share)": ("learner/idle_share", tag("generator", "idle_share")),
    "failures (share)": ("rollout/failed_share", "learner/stale_token_fraction"),
}
"""Charts of TensorBoard's tab *Custom scalars*, in the order in which a person looks at them. A name that ends in "/"
stands for all metrics below it."""
OVERVIEW = {
    name: f"1_overview/{number}_{name.replace('/', '_')}"
    for number, name in enumerate(
        (name for names in CHARTS.values() for name in names if not name.endswith("/")), start=1
    )
}
"""Metrics that TensorBoard shows twice, each with its second tag. The tags sort before all others, so the page that
TensorBoard opens begins with them."""


def histogram_tag(name: str) -> str:
    """Return the tag of a histogram.

    Raises:
        KeyError: the histogram is not declared.

    Example:
        >>> histogram_tag("return_generated"), histogram_tag("reward/exact")
        ('histogram/return_generated', 'histogram/reward/exact')
    """
    HISTOGRAMS["reward/NAME" if name.startswith("reward/") else name]
    return f"histogram/{name}"
