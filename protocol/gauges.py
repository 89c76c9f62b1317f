"""The gauges of heartbeats: name, unit, how the broker puts those of several peers together, and meaning.

Actors, generators and learners send them, the broker merges them, and the learner's TensorBoard, `/metrics`, `/status`
and docs/run/metrics.md show them under ``role/name``. They stand here because four rooms read them. A peer may send
gauges that are declared nowhere; they are merged by `merge_of`.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

Merge = Literal["sum", "mean", "total"]
"""How values of several peers become one. "total" is a sum that counts on after a peer is gone."""
ENV = "env/"
"""Begins the name of a gauge that an environment made. It has no role: actors pass it through."""


class Gauge(NamedTuple):
    """One number that is reported again and again."""

    name: str
    unit: str
    meaning: str
    merge: Merge = "mean"


def table(gauges: Iterable[Gauge]) -> dict[str, Gauge]:
    """Return gauges by name.

    Raises:
        ValueError: two have one name.

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
        Gauge("update_pause_seconds", "s", "time that the last weight update paused generation"),
        Gauge("updates_applied_total", "updates", "weight updates loaded", "total"),
        Gauge("updates_refused_total", "updates", "weight updates refused by verification", "total"),
        Gauge("updates_skipped_total", "updates", "weight updates passed over for a newer one", "total"),
        Gauge("policy_version", "version", "mean policy version in service"),
    ]
)
"""Of generators."""

ACTOR = table(
    [
        Gauge("episodes_running", "episodes", "episodes under way", "sum"),
        Gauge("episodes_finished_total", "episodes", "episodes that ended", "total"),
        Gauge("episodes_failed_total", "episodes", "episodes that failed", "total"),
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
    ]
)
"""Of actors."""

LEARNER = table(
    [
        Gauge("waiting_seconds", "s", "time that the learner has waited for the broker, while it waits"),
        Gauge(
            "units_here", "units", "units that are ready for the next batch, while the learner waits", "sum"
        ),
        Gauge("units_wanted", "units", "units that the learner waits for in all", "sum"),
    ]
)
"""Of learners; shown by `/status` only, because they stand still while the learner reports."""

BY_ROLE = {"actor": ACTOR, "generator": GENERATOR, "learner": LEARNER}


def merge_of(role: str, name: str) -> Merge:
    """Return how a gauge of several peers becomes one.

    A gauge that is declared nowhere, such as an environment's own, is averaged; if its name ends in ``_total`` it is a
    counter, which is added up and counts on after the peer is gone.

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
