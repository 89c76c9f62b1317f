"""The pages `/status` and `/metrics`: pure views of the state."""

import re
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from broker.core.dispatch import Dispatcher
from broker.core.gauges import gauges_of
from broker.core.ledger import Tally
from broker.core.peers import Peer
from broker.core.state import BrokerState
from broker.gauges import BROKER
from broker.waits import who_waits
from protocol.gauges import BY_ROLE


def status(dispatcher: Dispatcher, now: float, **more: dict[str, Any]) -> dict[str, Any]:
    """Return everything a person or a program may want to know, as JSON.

    Args:
        more: sections that the process around the dispatcher adds, by name: its journal, its security.
    """
    state, lineage = dispatcher.state, dispatcher.state.lineage
    page = {
        "run": dispatcher.run,
        "policy_version": dispatcher.learners.policy_version,
        "epoch": lineage.epoch if lineage else 0,
        "lineage": lineage.lineage if lineage else 0,
        "delivery_unit": state.assembly.mode,
        "peers": [_peer(dispatcher, peer, now) for peer in state.peers],
        "generators_offered": [info.peer for info in dispatcher.generators.offered],
        "queues": _queues(state),
        "episodes": dispatcher.actors.episodes.page(),
        "ledger": _ledger(state),
        "gauges": gauges_of(state),
        **more,
    }
    return page | {"waits": who_waits(page)}


def _queues(state: BrokerState) -> dict[str, Any]:
    return {
        "tasks_queued": state.tasks.queued,
        "tasks_leased": state.tasks.leased,
        "groups_incomplete": len(state.assembly.groups),
        "trajectories_open": len(state.assembly.trajectories),
        "units_ready": state.deliveries.ready,
        "units_leased": state.deliveries.leased,
        "units_committed": state.deliveries.committed,
        "segments_held": len(state.store),
        "segments_in_units_ready": state.deliveries.ready_segments,
        "segments_in_units_leased": state.deliveries.leased_segments,
        "bytes_held": state.store.nbytes,
        "bytes_committed": state.store.committed_nbytes,
        "segment_credit_outstanding": state.flow.outstanding,
        "room_segments": state.room(),
    }


def _ledger(state: BrokerState) -> dict[str, Any]:
    ledger = state.ledger
    return {
        "stored": _tally(ledger.stored),
        "held_tokens": ledger.held_tokens,
        "delivered": _tally(ledger.delivered),
        "redelivered": _tally(ledger.redelivered),
        "rolled_back": _tally(ledger.rolled_back),
        "outcomes": {name: _tally(tally) for name, tally in ledger.outcomes.items()},
        "violation": state.violation(),
        "length_bias_tokens": ledger.lengths.bias_tokens,
        "length_distance_tokens": ledger.lengths.distance_tokens,
        "replayed_tokens": ledger.replayed_tokens,
        "duplicate_segments": ledger.duplicate_segments,
        "refused": dict(sorted(ledger.refused.items())),
        "tasks": dict(sorted(ledger.tasks.items())),
    }


def _peer(dispatcher: Dispatcher, peer: Peer, now: float) -> dict[str, Any]:
    state = dispatcher.state
    entry: dict[str, Any] = {
        "name": peer.name,
        "role": peer.role,
        "host": peer.hello.host,
        "pid": peer.hello.pid,
        "incarnation": peer.hello.incarnation,
        "silent_s": round(now - peer.heard, 3),
        "connected_s": round(now - peer.joined, 3),
        "busy": peer.heartbeat.busy,
        "progress": peer.heartbeat.progress,
        "stalled_s": round(peer.stalled_for(now), 3) if peer.heartbeat.busy else 0.0,
        "gauges": peer.heartbeat.gauges,
        "note": peer.heartbeat.note,
    }
    if peer.role == "actor":
        leases = state.tasks.held_by(peer.name)
        entry["task_credit"] = peer.task_credit
        entry["segment_credit"] = state.flow.credit(peer.name)
        entry["leases"] = [record.trajectory_id for record in leases[:100]]
        entry["leases_count"] = len(leases)
    elif peer.role == "learner":
        entry["delivery_credit"] = peer.delivery_credit
        entry["epoch"] = peer.hello.epoch
    else:
        entry["endpoint"] = peer.hello.endpoint
        entry["policy_version"] = peer.heartbeat.policy_version
        entry["patience_s"] = peer.heartbeat.patience_s
    return entry


def _tally(tally: Tally) -> dict[str, int]:
    return {"segments": tally.segments, "tokens": tally.tokens, "action_tokens": tally.action_tokens}


class _Metrics(Collector):
    """One scrape of the state."""

    def __init__(self, dispatcher: Dispatcher, now: float) -> None:
        self._state, self._now = dispatcher, now

    def collect(self) -> Iterable[Metric]:
        state = self._state.state
        ledger = state.ledger
        tokens = CounterMetricFamily("offbeat_tokens", "Tokens by what became of them", labels=["outcome"])
        tokens.add_metric(["stored"], ledger.stored.tokens)
        tokens.add_metric(["delivered"], ledger.delivered.tokens)
        tokens.add_metric(["replayed"], ledger.replayed_tokens)
        for outcome, tally in ledger.outcomes.items():
            tokens.add_metric([outcome], tally.tokens)
        yield tokens
        refused = CounterMetricFamily("offbeat_refused", "Messages refused, by code", labels=["code"])
        for code, count in ledger.refused.items():
            refused.add_metric([code], count)
        yield refused
        tasks = CounterMetricFamily("offbeat_tasks", "What happened to tasks", labels=["event"])
        for event, count in ledger.tasks.items():
            tasks.add_metric([event], count)
        yield tasks
        silence = GaugeMetricFamily("offbeat_peer_silence_seconds", "Last heard", labels=["role", "peer"])
        for peer in state.peers:
            silence.add_metric([peer.role, peer.name], self._now - peer.heard)
        yield silence
        version = GaugeMetricFamily("offbeat_policy_version", "Newest published policy version")
        version.add_metric([], float(self._state.learners.policy_version))
        yield version
        for name, value in gauges_of(state).items():
            yield GaugeMetricFamily(_metric_name(name), _meaning(name), value=value)


def _meaning(name: str) -> str:
    role, _, gauge = name.partition("/")
    declared = (BROKER if role == "broker" else BY_ROLE.get(role, {})).get(gauge)
    if declared is None:
        return "Declared nowhere: an environment's own, or a foreign peer's"
    return f"{declared.meaning} ({declared.unit})"


def _metric_name(tag: str) -> str:
    return "offbeat_" + re.sub(r"[^a-zA-Z0-9_]", "_", tag)


def prometheus(dispatcher: Dispatcher, now: float) -> bytes:
    """Return the page `/metrics` in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Metrics(dispatcher, now))
    return generate_latest(registry)
