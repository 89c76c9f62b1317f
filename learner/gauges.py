"""Declares the learner's metrics: names, units and meanings. docs/run/metrics.md is generated from them."""

import re

from protocol.gauges import LEARNER_STEP, Gauge, table

ROLLOUT = table(
    [
        Gauge(
            "rollout/reward_mean", "reward", "mean reward per action turn of the trajectories that arrived"
        ),
        LEARNER_STEP["rollout/return_mean"],
        Gauge(
            "rollout/return_std",
            "reward",
            "standard deviation of the return of the trajectories that arrived",
        ),
        LEARNER_STEP["rollout/correct_share"],
        LEARNER_STEP["rollout/failed_share"],
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
        LEARNER_STEP["rollout/length_mean_tokens"],
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


STOOD = "stood_seconds"
STOOD_MEANING = "time for which the learner stood; 0 if generators of their own answered while it trained"
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
        Gauge("evaluation/stood_seconds", "s", STOOD_MEANING),
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
        Gauge("evaluation/NAME/stood_seconds", "s", STOOD_MEANING),
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


SELECTION = table(
    [
        Gauge("selection/unknown_share", "share", "tasks of the list without answers so far"),
        Gauge("selection/never_share", "share", "tasks of the list with answers, none of which was right"),
        Gauge(
            "selection/below_half_share",
            "share",
            "tasks of the list with a success rate above 0 and below 0.5",
        ),
        Gauge(
            "selection/above_half_share", "share", "tasks of the list with a success rate from 0.5 to below 1"
        ),
        Gauge("selection/always_share", "share", "tasks of the list whose answers were all right"),
        Gauge("selection/failed_share", "share", "tasks of the list whose last group had no success"),
        Gauge(
            "selection/left_out_share",
            "share",
            'tasks of the list that are not dealt any more; only with `kind = "prune"` or `"filter"`',
        ),
        Gauge(
            "selection/damped_share",
            "share",
            "groups whose advantages are divided, because their task was dealt of late, among those dealt since the "
            'last step; only with `kind = "value"`',
        ),
        Gauge(
            "selection/group_size_mean",
            "trajectories",
            "mean members of the groups that were dealt since the last step; only with `[learner.budget]`",
        ),
        Gauge(
            "selection/group_size_max",
            "trajectories",
            "members of the largest of these groups; only with `[learner.budget]`",
        ),
        Gauge(
            "selection/instructions",
            "instructions",
            'instructions that are not pruned; only with `kind = "population"`',
        ),
        Gauge(
            "selection/best_instruction",
            "1",
            "place, from 0, of the instruction with the largest share of the groups; as above",
        ),
        Gauge(
            "selection/best_instruction_share",
            "share",
            "probability with which the next group gets it; as above",
        ),
        Gauge(
            "selection/proposals",
            "instructions",
            "instructions that the policy proposed since the run began; only with `[learner.family]` of kind "
            '"propose"',
        ),
        Gauge(
            "selection/proposals_unreadable",
            "instructions",
            "proposals that may not stand in a prompt, and were not used; as above",
        ),
        Gauge(
            "selection/proposals_repeated",
            "instructions",
            "proposals that were there already, and were not used; as above",
        ),
        Gauge(
            "selection/proposals_taken",
            "instructions",
            "proposals that took the place of a pruned instruction; as above",
        ),
        Gauge(
            "selection/proposed_share",
            "share",
            "probability with which the next group gets an instruction that was proposed; as above",
        ),
        Gauge(
            "selection/informative_share",
            "share",
            "groups with different returns among those that were trained or dropped since the last step",
        ),
    ]
)
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
            "family/readable_share",
            "share",
            "share of the judgements, or of the proposed instructions, since the last step that can be read; only with "
            '`kind = "judge"`, "verdict" or "propose"',
        ),
        Gauge(
            "family/flawed_share",
            "share",
            "share of the judged answers since the last step in which most judgements named a mistake; only with "
            '`kind = "verdict"`',
        ),
        Gauge(
            "family/verdict_right_share",
            "share",
            "share of these verdicts that agree with the reward `learner.family.truth`; only where it is set",
        ),
        Gauge(
            "family/improved_share",
            "share",
            "share of the answers since the last step that are better than the draft they read; only with "
            '`kind = "draft"`',
        ),
        Gauge(
            "family/hinted_right_share",
            "share",
            'share of the answers behind a hint since the last step that are right; only with `kind = "hint"`',
        ),
        Gauge(
            "family/guided_right_share",
            "share",
            'share of the answers behind examples since the last step that are right; only with `kind = "guided"`',
        ),
        Gauge(
            "family/steered_right_share",
            "share",
            "share of the answers behind a demonstration since the last step that are right, and trained behind the "
            'plain prompt; only with `kind = "steered"`',
        ),
        Gauge(
            "family/taught_right_share",
            "share",
            'share of the answers of teachers since the last step that are right; only with `kind = "taught"`',
        ),
        Gauge(
            "family/taught_group_share",
            "share",
            "share of the groups since the last step that got a right answer of a teacher; only with "
            '`kind = "taught"`',
        ),
        Gauge(
            "family/branched_share",
            "share",
            "share of the later episodes since the last step that begin in the middle of another; only with "
            '`kind = "branch"`',
        ),
        Gauge(
            "family/retried_right_share",
            "share",
            'share of the retries since the last step that are right; only with `kind = "retry"`',
        ),
        Gauge(
            "family/named_share",
            "share",
            'share of the reflections since the last step that name a step to keep; only with `begin = "named"`',
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


UPDATE = table(
    [
        LEARNER_STEP["learner/loss"],
        LEARNER_STEP["learner/gradient_norm"],
        Gauge("learner/learning_rate", "rate", "learning rate of the step"),
        LEARNER_STEP["learner/entropy_nats"],
        LEARNER_STEP["learner/kl_current_proximal_nats"],
        LEARNER_STEP["learner/kl_proximal_behaviour_nats"],
        LEARNER_STEP["learner/clip_fraction"],
        Gauge(
            "learner/gradient_cosine",
            "cosine",
            "gradients of an optimizer step and of the one before it, mean over the step's optimizer steps",
        ),
        Gauge(
            "learner/acted_fraction",
            "share",
            "share of trained tokens whose gradient differs by 1 % or more from that of REINFORCE with weight 1",
        ),
        Gauge(
            "learner/kl_proximal_teacher_nats",
            "nats",
            "k1 estimate of KL(proximal ‖ teacher), of `learner.algorithm.distillation`: what is left to learn",
        ),
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
        LEARNER_STEP["learner/effective_sample_size"],
        Gauge(
            "learner/under_way_wanted",
            "trajectories",
            'how many may be under way, the batch in training among them, if learner.under_way is "needed"',
        ),
        LEARNER_STEP["learner/policy_lag_mean_versions"],
        LEARNER_STEP["learner/policy_lag_max_versions"],
        LEARNER_STEP["learner/stale_token_fraction"],
        Gauge("learner/trained_tokens", "tokens", "action tokens that carried gradient in the step"),
        Gauge("learner/replayed_tokens", "tokens", "tokens of the step that had been trained before"),
        Gauge(
            "learner/given_tokens", "tokens", "tokens of the step that somebody else wrote (`learner.given`)"
        ),
        Gauge(
            "learner/given_loss_nats",
            "nats",
            "mean negative log-probability of these tokens before the step",
        ),
        Gauge(
            "learner/guided_tokens",
            "tokens",
            "trained tokens that were sampled behind a note and are trained behind the prompt without it",
        ),
        Gauge(
            "learner/distilled_share",
            "share",
            "share of the trained tokens that learn from the policy behind a solved sibling "
            "(`learner.algorithm.siblings`)",
        ),
        Gauge("learner/taught_tokens", "tokens", "trained tokens that a teacher wrote (`learner.taught`)"),
        Gauge("learner/lane_share", "share", "trained tokens that were sampled in a lane"),
        Gauge("learner/lane_temperature", "1", "mean temperature of the lane's answers of the batch"),
        Gauge("learner/padding_fraction", "share", "share of computed positions that were padding"),
        Gauge(
            "learner/shared_fraction",
            "share",
            "share of the input tokens that another trajectory had computed",
        ),
        LEARNER_STEP["learner/step_seconds"],
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
        LEARNER_STEP["learner/wait_seconds"],
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
        LEARNER_STEP["learner/idle_share"],
        LEARNER_STEP["learner/trained_tokens_per_second"],
        Gauge("learner/tokens_trained_total", "tokens", "action tokens trained so far"),
        Gauge("learner/tokens_replayed_total", "tokens", "action tokens trained again so far"),
        Gauge("learner/policy_version", "version", "newest version, announced or about to be"),
        LEARNER_STEP["learner/skipped_steps"],
        LEARNER_STEP["learner/tracker_records_lost"],
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
        Gauge(
            "modes/forced_right_share",
            "share",
            "right answers among those that were forced into a mode since the last step; only with "
            '`learner.reward.group.kind = "modes"`',
        ),
        Gauge(
            "modes/cheap_share", "share", "answers in the cheap mode among those that chose a mode; as above"
        ),
        Gauge(
            "modes/paid_less_share",
            "share",
            "answers that are paid less, because their task is easy and their mode dear, among those that chose; as "
            "above",
        ),
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


SCALARS = table(
    [
        gauge
        for part in (ROLLOUT, UPDATE, METHODS, ENTROPY, CRITIC, REPLAY, FAMILY, SELECTION, EVALUATION)
        for gauge in part.values()
    ]
)
"""All metrics except the histograms, and except those of named evaluation sets."""
_OF_A_SET = re.compile(r"evaluation/[\w-]+/(.+)")


def declared(tag: str) -> Gauge:
    """Return the declaration of a metric.

    Raises:
        KeyError: it is not declared.

    Example:
        >>> declared("evaluation/hard/pass_at_4").unit
        'share'
    """
    if match := _OF_A_SET.fullmatch(tag):
        return EVALUATION_SETS[f"evaluation/NAME/{re.sub(r'pass_at_[0-9]+', 'pass_at_K', match[1])}"]
    return SCALARS[tag]


def is_declared(name: str) -> bool:
    """Return whether a metric of the learner is declared here, by its name or by its prefix.

    Example:
        >>> is_declared("learner/loss"), is_declared("reward/exact"), is_declared("learner/los")
        (True, True, False)
    """
    if name.startswith((REWARD, HELDOUT_REWARD)):
        return True
    try:
        declared(name)
    except KeyError:
        return False
    return True
