"""The gauges of heartbeats: name, unit, meaning, and how the broker merges the values of several peers.

Actors, generators and learners send gauges, and the broker merges them. The learner's TensorBoard,
`/metrics`, `/status` and docs/run/metrics.md show them under ``role/name``. They are declared here because
four packages read them. A peer may send gauges that are not declared; `merge_of` says how they are merged.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

Merge = Literal["sum", "mean", "total"]
"""How the values of several peers are merged. "total" is a sum that still includes peers that are gone."""
MAX_GAUGES, MAX_GAUGE_NAME = 64, 64
"""Most gauges of a heartbeat that the broker keeps, and most characters of their names."""
ENV = "env/"
"""Prefix of an environment's gauges. They are shown without a role, because actors only pass them through."""


class Gauge(NamedTuple):
    """One number that a process reports repeatedly."""

    name: str
    unit: str
    meaning: str
    merge: Merge = "mean"


def table(gauges: Iterable[Gauge]) -> dict[str, Gauge]:
    """Return gauges by name.

    Raises:
        ValueError: two gauges have the same name.

    Example:
        >>> list(table([Gauge("idle_share", "share", "time without work")]))
        ['idle_share']
    """
    by_name: dict[str, Gauge] = {}
    for gauge in gauges:
        if gauge.name in by_name:
            raise ValueError(f"gauge {gauge.name} is declared twice")
        by_name[gauge.name] = gauge
    return by_name


GENERATOR = table(
    [
        Gauge("tokens_total", "tokens", "action tokens sampled by all generators", "total"),
        Gauge(
            "tokens_per_second", "tokens/s", "action tokens that all generators sample per second now", "sum"
        ),
        Gauge("running_requests", "requests", "requests under way", "sum"),
        Gauge(
            "held_requests", "requests", "requests that wait for a policy version not yet in service", "sum"
        ),
        Gauge("waiting_requests", "requests", "running requests that wait for a place in vLLM", "sum"),
        Gauge(
            "kv_cache_share",
            "share",
            "share of the KV cache in use; near 1 with waiting requests, it is too small",
        ),
        Gauge(
            "prefix_hit_share",
            "share",
            "share of new prompts' tokens whose keys and values were in the cache",
        ),
        Gauge(
            "recomputed_total",
            "requests",
            "requests computed again from the start, for new weights or for want of room",
            "total",
        ),
        Gauge("idle_share", "share", "share of wall time without a running request"),
        Gauge("idle_seconds_total", "s", "seconds without a running request, of all generators", "total"),
        Gauge(
            "serving_seconds_total", "s", "seconds that generators have served, with requests or not", "total"
        ),
        Gauge(
            "asleep_seconds_total",
            "s",
            "time for which engines have slept, so that the learner could update on their GPU",
            "total",
        ),
        Gauge("update_pause_seconds", "s", "time that the last weight update paused generation"),
        Gauge("updates_applied_total", "updates", "weight updates loaded", "total"),
        Gauge("updates_refused_total", "updates", "weight updates refused by verification", "total"),
        Gauge("updates_skipped_total", "updates", "weight updates passed over for a newer one", "total"),
        Gauge("policy_version", "version", "mean policy version in service"),
    ]
)
"""Gauges that generators report."""

ACTOR = table(
    [
        Gauge("episodes_running", "episodes", "episodes under way", "sum"),
        Gauge("episodes_finished_total", "episodes", "episodes that ended", "total"),
        Gauge("episodes_failed_total", "episodes", "episodes that failed", "total"),
        Gauge(
            "episodes_given_back_total",
            "episodes",
            "episodes that ended by the fault of neither environment nor model, so that their task runs again",
            "total",
        ),
        Gauge("env_seconds", "s", "mean time that an episode spends in its environment"),
        Gauge("tokens_total", "tokens", "tokens of all episodes, observations included", "total"),
        Gauge("segments_waiting", "segments", "segments that wait for segment credit", "sum"),
        Gauge("segments_refused_total", "segments", "segments that the broker refused", "total"),
        Gauge(
            "generator_interruptions_total",
            "requests",
            "requests that a generator did not bring to their end and that went on elsewhere",
            "total",
        ),
        Gauge(
            "teacher_answers_total",
            "answers",
            "answers that teachers gave; only with `actor.teachers`",
            "total",
        ),
        Gauge(
            "teacher_failures_total",
            "answers",
            "answers that teachers did not give: an error, no text, too late, or asked while they rest",
            "total",
        ),
    ]
)
"""Gauges that actors report."""

LEARNER = table(
    [
        Gauge("waiting_seconds", "s", "time that the learner has waited for the broker, while it waits"),
        Gauge(
            "units_here", "units", "units that are ready for the next batch, while the learner waits", "sum"
        ),
        Gauge("units_wanted", "units", "units that the learner waits for in all", "sum"),
        Gauge("uniform_groups_in_a_row", "groups", "groups that ended last, all with equal returns", "sum"),
        Gauge("uniform_return", "reward", "return in the last group with equal returns"),
        Gauge("trained_tokens_total", "tokens", "action tokens trained for the first time", "total"),
        Gauge("busy_seconds_total", "s", "time of all steps in which the learner did not wait", "total"),
        Gauge(
            "idle_seconds_total", "s", "time of all steps in which the learner waited for a batch", "total"
        ),
    ]
)
"""Gauges that learners report, where they apply. Only `/status` shows them."""

LEARNER_STEP = table(
    [
        Gauge("learner/loss", "loss", "loss of the step, mean over its tokens on all ranks"),
        Gauge("learner/gradient_norm", "norm", "norm of the gradient before clipping"),
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
        Gauge("learner/step_seconds", "s", "time of the update"),
        Gauge("learner/wait_seconds", "s", "time waited for a full batch before the update"),
        Gauge("learner/idle_share", "share", "share of wall time since the last step spent waiting"),
        Gauge(
            "learner/trained_tokens_per_second",
            "tokens/s",
            "trained action tokens over wall time since the last step",
        ),
        Gauge(
            "learner/skipped_steps",
            "steps",
            "steps so far that were skipped because loss or gradient was not finite",
        ),
        Gauge(
            "learner/tracker_records_lost",
            "records",
            "records that trackers did not take since this process began; absent if TensorBoard is the only tracker",
        ),
        Gauge(
            "rollout/return_mean",
            "reward",
            "mean return (weighted sum of rewards) of the trajectories that arrived",
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
        Gauge("rollout/length_mean_tokens", "tokens", "mean action tokens of the trajectories that arrived"),
    ]
)
"""Metrics of the newest learner step, by their full names, which heartbeats carry to `/metrics`. The learner's
TensorBoard has them, too, so the broker does not merge them."""

BY_ROLE = {"actor": ACTOR, "generator": GENERATOR, "learner": LEARNER}


def merge_of(role: str, name: str) -> Merge:
    """Return how the values of a gauge from several peers are merged.

    A gauge that is declared nowhere, for example an environment's, is averaged. If its name ends in
    ``_total`` it is a counter: values are added up, and peers that are gone still count.

    Example:
        >>> merge_of("generator", "running_requests"), merge_of("actor", "env/games_total"), merge_of("actor", "env/x")
        ('sum', 'total', 'mean')
    """
    declared = BY_ROLE.get(role, {}).get(name)
    if declared is not None:
        return declared.merge
    return "total" if name.endswith("_total") else "mean"


def tag(role: str, name: str) -> str:
    """Return the name under which a merged gauge is shown.

    Example:
        >>> tag("actor", "episodes_running"), tag("actor", "env/games_total")
        ('actor/episodes_running', 'env/games_total')
    """
    return name if name.startswith(ENV) else f"{role}/{name}"
