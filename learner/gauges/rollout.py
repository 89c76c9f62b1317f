"""Metrics of the trajectories as they arrive, before filtering."""

from protocol.gauges import Gauge, table

ROLLOUT = table(
    [
        Gauge(
            "rollout/reward_mean", "reward", "mean reward per action turn of the trajectories that arrived"
        ),
        Gauge(
            "rollout/return_mean",
            "reward",
            "mean return (weighted sum of rewards) of the trajectories that arrived",
        ),
        Gauge(
            "rollout/return_std",
            "reward",
            "standard deviation of the return of the trajectories that arrived",
        ),
        Gauge(
            "rollout/correct_share",
            "share",
            "share of arrived trajectories that solved the task exactly; absent if the environment never says so",
        ),
        Gauge(
            "rollout/failed_share",
            "share",
            "share of the episodes since the last step that failed; the text tab says why",
        ),
        Gauge(
            "rollout/failed_trajectories",
            "trajectories",
            "episodes so far that failed or could not be read (recorded, not trained)",
        ),
        Gauge(
            "rollout/uniform_trajectories",
            "trajectories",
            "trajectories so far that were left out because the returns of their group are equal",
        ),
        Gauge(
            "rollout/stale_trajectories",
            "trajectories",
            "trajectories so far that the broker or the learner dropped as too stale",
        ),
        Gauge(
            "rollout/recommitted_trajectories",
            "trajectories",
            "trajectories so far that came again after their commit and were not trained again",
        ),
        Gauge("rollout/length_mean_tokens", "tokens", "mean action tokens of the trajectories that arrived"),
        Gauge(
            "rollout/length_trained_mean_tokens",
            "tokens",
            "mean action tokens of the trajectories, or windows, trained",
        ),
        Gauge("rollout/turns_mean", "turns", "mean action turns of the trajectories that arrived"),
        Gauge("rollout/branches_mean", "branches", "mean branches of the trajectories that arrived"),
        Gauge(
            "rollout/begun_anew_fraction",
            "share",
            "share of the tokens that arrived in whole prompts of further conversations of an episode",
        ),
        Gauge(
            "rollout/auxiliary_fraction",
            "share",
            "share of the action tokens that arrived in turns which the environment leaves out of training",
        ),
    ]
)
"""Metrics of the trajectories as they arrive, before filtering."""
REWARD = "reward/"
"""Prefix of the mean of each reward by name, in training; the names come from the environment."""
