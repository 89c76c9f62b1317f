"""The page `/metrics`: a pure view of the broker's state in Prometheus' text format.

A number that never falls is a counter, and everything else is a gauge. A learner that goes back to a checkpoint lowers
its step, so steps are a gauge. Labels come from names in the run file, from environments and from exceptions; how many
of them there can be is bounded where they are counted.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from broker.core.dispatch import Dispatcher
from broker.core.state import gauges_of
from broker.status import BROKER, FLEET, HOSTS
from protocol.gauges import BY_ROLE, LEARNER, LEARNER_STEP

OTHER_KIND = "other"
"""Label of failures that are no exception of a known kind, or that came after too many kinds."""
MAX_LABEL = 100
"""Most characters of a label's value."""
_EVALUATION = re.compile(r"evaluation/(?:(?P<set>[\w-]+)/)?(?P<metric>\w+)")


class _Metrics(Collector):
    """One scrape of the state."""

    def __init__(self, dispatcher: Dispatcher, now: float) -> None:
        self._dispatcher, self._state, self._now = dispatcher, dispatcher.state, now

    def collect(self) -> Iterable[Metric]:
        yield from self._of_ledger()
        yield from self._of_peers()
        yield from self._of_episodes()
        yield from self._of_learner()
        by_host: dict[str, dict[str, float]] = {}
        for name, value in gauges_of(self._state).items():
            if name.startswith("hosts/") and name.count("/") > 1:
                _, gauge, host = name.split("/", 2)
                by_host.setdefault(f"hosts/{gauge}", {})[host] = value
            else:
                yield _one(_metric_name(name), _meaning(name), value)
        for name, values in by_host.items():
            yield _gauges(_metric_name(name), _meaning(name), "host", values)

    def _of_ledger(self) -> Iterator[Metric]:
        ledger = self._state.ledger
        outcomes: dict[str, float] = {
            "stored": ledger.stored.tokens,
            "delivered": ledger.delivered.tokens,
            "replayed": ledger.replayed_tokens,
            **{outcome: ledger.counted_tokens(outcome) for outcome in ledger.outcomes},
        }
        yield _counters(
            "offbeat_tokens", "Tokens by what became of them, undone steps included", "outcome", outcomes
        )
        yield _counters("offbeat_refused", "Messages refused, by code", "code", ledger.refused)
        yield _counters("offbeat_tasks", "What happened to tasks", "event", ledger.tasks)

    def _of_peers(self) -> Iterator[Metric]:
        peers = list(self._state.peers)
        silence = GaugeMetricFamily("offbeat_peer_silence_seconds", "Last heard", labels=["role", "peer"])
        for peer in peers:
            silence.add_metric([peer.role, peer.name], self._now - peer.heard)
        yield silence
        yield _gauges(
            "offbeat_generator_version",
            "Policy version in service at each generator",
            "peer",
            {p.name: float(p.heartbeat.policy_version) for p in peers if p.role == "generator"},
        )
        text = "Processes that took the name of an earlier one, since the broker began"
        restarts = {str(role): float(count) for role, count in self._state.peers.restarts.items()}
        yield _counters("offbeat_restarts", text, "role", restarts)
        version = float(self._dispatcher.learners.policy_version)
        yield GaugeMetricFamily("offbeat_policy_version", "Newest published policy version", value=version)

    def _of_episodes(self) -> Iterator[Metric]:
        page, kinds = self._dispatcher.actors.episodes.page(), dict[str, int]()
        for row in page["failures"]:
            kind = row["kind"][:MAX_LABEL] or OTHER_KIND
            kinds[kind] = kinds.get(kind, 0) + row["count"]
        if rest := page["failed"] - sum(kinds.values()):
            kinds[OTHER_KIND] = kinds.get(OTHER_KIND, 0) + rest
        yield CounterMetricFamily(
            "offbeat_episodes_ended", "Episodes that ended, failed ones included", page["ended"]
        )
        yield _counters(
            "offbeat_episodes_failed", "Episodes that failed, by kind of the failure", "kind", kinds
        )
        text = "Attempts that an actor rejected by the fault of neither environment nor model"
        yield CounterMetricFamily("offbeat_episodes_interrupted", text, page["interrupted"])

    def _of_learner(self) -> Iterator[Metric]:
        state, learners = self._state, self._dispatcher.learners
        text = "Newest learner step that was committed; it falls if a learner goes back to a checkpoint"
        yield GaugeMetricFamily("offbeat_learner_step", text, value=float(state.steps.committed))
        if learners.stepped_at is not None:
            text = "Seconds since the newest learner step, or since a learner joined if there was none"
            yield GaugeMetricFamily(
                "offbeat_learner_seconds_since_step", text, value=self._now - learners.stepped_at
            )
        bound = float(state.deliveries.max_policy_lag)
        yield GaugeMetricFamily("offbeat_policy_lag_bound_versions", "Bound of the policy lag", value=bound)
        if learners.learner is not None:
            yield from _of_step(learners.learner.heartbeat.gauges)


def _of_step(gauges: Mapping[str, float]) -> Iterator[Metric]:
    """Yield what a learner says of its newest step."""
    rewards, held_out, evaluations = dict[str, float](), dict[str, float](), list[tuple[str, str, float]]()
    for name, value in gauges.items():
        if name.startswith("reward/"):
            rewards[name.removeprefix("reward/")] = value
        elif name.startswith("evaluation/reward/"):
            held_out[name.removeprefix("evaluation/reward/")] = value
        elif match := _EVALUATION.fullmatch(name):
            evaluations.append((match["set"] or "", match["metric"], value))
        elif declared := LEARNER_STEP.get(name) or LEARNER.get(name):
            full = name if "/" in name else f"learner/{name}"
            yield _one(_metric_name(full), f"{declared.meaning} ({declared.unit})", value)
    yield _gauges(
        "offbeat_reward", "Mean of each reward in the newest step, without weights", "reward", rewards
    )
    text = "Mean of each reward on held-out tasks at the newest evaluation, without weights"
    yield _gauges("offbeat_heldout_reward", text, "reward", held_out)
    text = "Result of the newest evaluation of each set; the set of learner.evaluation_tasks has no name"
    evaluation = GaugeMetricFamily("offbeat_evaluation", text, labels=["set", "metric"])
    for set_name, metric, value in evaluations:
        evaluation.add_metric([set_name, metric], value)
    yield evaluation


def _one(name: str, text: str, value: float) -> Metric:
    """Return a counter if the name ends in ``_total``, else a gauge."""
    if name.endswith("_total"):
        # Sums of floats that come and go differ in their last digits, and a counter must not fall by them.
        return CounterMetricFamily(name.removesuffix("_total"), text, value=round(value, 3))
    return GaugeMetricFamily(name, text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _meaning(name: str) -> str:
    role, _, gauge = name.partition("/")
    own = {**BY_ROLE, "broker": BROKER, "fleet": FLEET, "hosts": HOSTS}
    declared = own.get(role, {}).get(gauge)
    if declared is None:
        return "Declared nowhere: an environment's own, or a foreign peer's"
    return f"{declared.meaning} ({declared.unit})"


def _metric_name(tag: str) -> str:
    return "offbeat_" + re.sub(r"[^a-zA-Z0-9_]", "_", tag)


def prometheus(dispatcher: Dispatcher, now: float) -> bytes:
    """Return the page `/metrics`."""
    registry = CollectorRegistry()
    registry.register(_Metrics(dispatcher, now))
    return generate_latest(registry)
