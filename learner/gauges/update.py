"""Metrics of the update: those of every method, and those that only some methods or a critic have."""

from protocol.gauges import Gauge, table

UPDATE = table(
    [
        Gauge("learner/loss", "loss", "loss of the step, mean over its tokens on all ranks"),
        Gauge("learner/gradient_norm", "norm", "norm of the gradient before clipping"),
        Gauge("learner/learning_rate", "rate", "learning rate of the step"),
        Gauge("learner/entropy_nats", "nats", "mean entropy of the current policy on trained tokens"),
        Gauge(
            "learner/kl_current_proximal_nats",
            "nats",
            "k3 estimate of KL(current ‖ proximal): what the update itself moved",
        ),
        Gauge(
            "learner/kl_proximal_behaviour_nats",
            "nats",
            "k3 estimate between proximal and behaviour: staleness and engine mismatch",
        ),
        Gauge("learner/clip_fraction", "share", "share of trained tokens whose gradient the clip cut off"),
        Gauge(
            "learner/ratio_current_proximal_mean",
            "ratio",
            "importance ratio current/proximal, mean over trained tokens",
        ),
        Gauge(
            "learner/ratio_current_proximal_min",
            "ratio",
            "smallest importance ratio current/proximal of a trained token",
        ),
        Gauge(
            "learner/ratio_current_proximal_max",
            "ratio",
            "largest importance ratio current/proximal of a trained token",
        ),
        Gauge(
            "learner/ratio_proximal_behaviour_mean",
            "ratio",
            "importance ratio proximal/behaviour, mean over trained tokens",
        ),
        Gauge(
            "learner/ratio_proximal_behaviour_min",
            "ratio",
            "smallest importance ratio proximal/behaviour of a trained token",
        ),
        Gauge(
            "learner/ratio_proximal_behaviour_max",
            "ratio",
            "largest importance ratio proximal/behaviour of a trained token",
        ),
        Gauge(
            "learner/truncated_fraction",
            "share",
            "share of trained tokens whose correction weight sits at the ceiling",
        ),
        Gauge(
            "learner/effective_sample_size",
            "share",
            "effective share of the tokens under the proximal/behaviour weights",
        ),
        Gauge("learner/policy_lag_mean_versions", "versions", "mean lag of trained tokens"),
        Gauge("learner/policy_lag_max_versions", "versions", "largest lag of a trained token"),
        Gauge(
            "learner/stale_token_fraction",
            "share",
            "share of action tokens masked out as older than the lag bound",
        ),
        Gauge("learner/trained_tokens", "tokens", "action tokens that carried gradient in the step"),
        Gauge("learner/replayed_tokens", "tokens", "tokens of the step that had been trained before"),
        Gauge("learner/padding_fraction", "share", "share of computed positions that were padding"),
        Gauge(
            "learner/shared_fraction",
            "share",
            "share of the input tokens that another trajectory had computed",
        ),
        Gauge("learner/step_seconds", "s", "time of the update"),
        Gauge(
            "learner/tflops_per_rank",
            "Tflop/s",
            "useful floating-point operations of a rank in a second of the update: both passes over each computed "
            "token, without padding and what is computed twice; over the rate of your GPU it is the MFU",
        ),
        Gauge(
            "learner/gpu_memory_peak_gb",
            "GB",
            "most memory that tensors of rank 0 took on its GPU during the update",
        ),
        Gauge(
            "learner/gpu_memory_used_share",
            "share",
            "share of the memory of rank 0's GPU that all its processes held at the end of the update",
        ),
        Gauge("learner/wait_seconds", "s", "time waited for a full batch before the update"),
        Gauge(
            "learner/publish_seconds",
            "s",
            "time that the learner stood for the new version: until its weights were copied",
        ),
        Gauge(
            "learner/announce_seconds",
            "s",
            "time from the beginning of a publication until generators hear of it, for the newest announced version",
        ),
        Gauge(
            "learner/gpu_wait_seconds",
            "s",
            "time for which the update waited until all generators slept on the GPU that they share with the learner",
        ),
        Gauge("learner/idle_share", "share", "share of wall time since the last step spent waiting"),
        Gauge(
            "learner/trained_tokens_per_second",
            "tokens/s",
            "trained action tokens over wall time since the last step",
        ),
        Gauge("learner/tokens_trained_total", "tokens", "action tokens trained so far"),
        Gauge("learner/tokens_replayed_total", "tokens", "action tokens trained again so far"),
        Gauge("learner/policy_version", "version", "newest version, announced or about to be"),
        Gauge(
            "learner/skipped_steps",
            "steps",
            "steps so far that were skipped because loss or gradient was not finite",
        ),
    ]
)
"""Metrics of the update."""

METHODS = table(
    [
        Gauge("learner/correction_mean", "weight", "mean correction weight of trained tokens"),
        Gauge("learner/ratio_variance", "ratio²", "mean of (current/behaviour - 1)² over trained tokens"),
        Gauge(
            "learner/clip_low",
            "ratio",
            "lower bound of the ratio that balancing chose, mean over the optimizer steps",
        ),
        Gauge(
            "learner/clip_high",
            "ratio",
            "upper bound of the ratio that balancing chose, mean over the optimizer steps",
        ),
        Gauge(
            "learner/positive_share",
            "share",
            "share of positive-advantage tokens in the surrogate under the chosen bounds",
        ),
        Gauge("learner/clip_moves", "moves", "how often balancing moved a bound"),
        Gauge(
            "learner/routes_known_share",
            "share",
            "share of the input tokens whose experts in the generator were known and replayed; the others went through "
            "the experts that the routers choose now",
        ),
        Gauge(
            "learner/rerouted_share",
            "share",
            "share of the replayed choices of experts that the routers would not make any more",
        ),
        Gauge("learner/dual_variable", "factor", "factor of the penalty on the ratio's variance"),
        Gauge("learner/entropy_coefficient", "factor", "coefficient of the entropy bonus"),
    ]
)
"""Metrics that only some methods report."""

ENTROPY = table(
    [
        Gauge(
            "learner/entropy_change",
            "nats",
            "entropy gained per unit of learning rate, predicted from unclipped tokens",
        ),
        Gauge(
            "learner/entropy_change_low_positive",
            "nats",
            "part of the change from unlikely tokens with positive advantage",
        ),
        Gauge(
            "learner/entropy_change_high_positive",
            "nats",
            "part of the change from likely tokens with positive advantage",
        ),
        Gauge(
            "learner/entropy_change_low_negative",
            "nats",
            "part of the change from unlikely tokens with negative advantage",
        ),
        Gauge(
            "learner/entropy_change_high_negative",
            "nats",
            "part of the change from likely tokens with negative advantage",
        ),
    ]
)
"""First-order effect of the update on the entropy."""

CRITIC = table(
    [
        Gauge(
            "critic/loss",
            "loss",
            "half the mean squared distance of values to their targets, before the update",
        ),
        Gauge("critic/value_mean", "reward", "mean value of the tokens the critic learned from"),
        Gauge(
            "critic/explained_variance",
            "share",
            "share of the targets' variance that the values explain; 1 is perfect",
        ),
        Gauge("critic/tokens", "tokens", "tokens the critic learned from"),
        Gauge("critic/gradient_norm", "norm", "norm of a separate critic's gradient before clipping"),
    ]
)
"""Metrics of the critic, in steps that train values."""
