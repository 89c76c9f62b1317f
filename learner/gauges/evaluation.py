"""Metrics of evaluations on held-out tasks, and their tags."""

from protocol.gauges import Gauge, table

EVALUATION = table(
    [
        Gauge(
            "evaluation/accuracy",
            "share",
            "share of held-out tasks solved exactly, greedy; those never run do not count; absent if the environment "
            "never says so",
        ),
        Gauge("evaluation/return_mean", "reward", "mean return on answered held-out tasks, greedy"),
        Gauge("evaluation/answered_tasks", "tasks", "held-out tasks whose episode ended, right or wrong"),
        Gauge(
            "evaluation/failed_tasks",
            "tasks",
            "held-out tasks that the environment or the model failed: wrong",
        ),
        Gauge(
            "evaluation/not_run_tasks",
            "tasks",
            "held-out tasks given up for want of a generator or an actor; with more than 5 % there are no means",
        ),
    ]
)
"""Metrics of evaluations."""

EVALUATION_SETS = table(
    [
        Gauge(
            "evaluation/NAME/accuracy",
            "share",
            "mean over tasks of the share of right answers, which is pass@1; absent if the environment never says so",
        ),
        Gauge(
            "evaluation/NAME/pass_at_K",
            "share",
            "mean over tasks of the chance that at least one of K answers is right, without bias",
        ),
        Gauge("evaluation/NAME/return_mean", "reward", "mean return of the answers that ended"),
        Gauge("evaluation/NAME/answered", "answers", "answers whose episode ended, right or wrong"),
        Gauge("evaluation/NAME/failed", "answers", "answers that the environment or the model failed"),
        Gauge("evaluation/NAME/not_run", "answers", "answers given up for want of a generator or an actor"),
    ]
)
"""Metrics of the sets `[learner.evaluation.NAME]`."""
HELDOUT_REWARD = "evaluation/reward/"
"""Prefix of the mean of each reward by name, on held-out tasks."""


def evaluation_tag(name: str, metric: str) -> str:
    """Return the tag of a metric of an evaluation set; ``name`` is "" for `learner.evaluation_tasks`.

    Example:
        >>> evaluation_tag("", "failed_tasks"), evaluation_tag("hard", "failed_tasks")
        ('evaluation/failed_tasks', 'evaluation/hard/failed')
    """
    return f"evaluation/{name}/{metric.removesuffix('_tasks')}" if name else f"evaluation/{metric}"
