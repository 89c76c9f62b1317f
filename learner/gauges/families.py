"""Metrics of families of groups."""

from protocol.gauges import Gauge, table

FAMILY = table(
    [
        Gauge("family/waiting", "families", "families that wait for a group at the end of the step"),
        Gauge("family/children", "tasks", "tasks that families have asked for, since this process began"),
        Gauge(
            "family/stages",
            "groups",
            "mean groups of the families that had all their groups since the last step, the first one included",
        ),
        Gauge(
            "family/agreement",
            "correlation",
            'mean agreement of the batch\'s judgements with the reference, -1 to 1; only with `kind = "judge"`',
        ),
        Gauge(
            "family/judged",
            "reward",
            "mean value that judgements gave to the batch's answers without a reference, 0 to 1; only with `kind = "
            '"judge"`',
        ),
        Gauge(
            "family/refined_share",
            "share",
            'share of the batch\'s refined episodes that beat both groups; only with `kind = "refine"`',
        ),
        Gauge(
            "family/masked_share",
            "share",
            "share of the batch's action tokens that are older than the lag bound, so that they carry no gradient",
        ),
        Gauge(
            "family/deadlines",
            "families",
            "families that were trained without a group that did not come in time, since this process began",
        ),
        Gauge(
            "family/diverged_prefixes",
            "trajectories",
            "branches that failed because the environment answered a repeated action in a different way, since this "
            "process began",
        ),
    ]
)
"""Metrics of families of groups; only with `[learner.family]`."""
