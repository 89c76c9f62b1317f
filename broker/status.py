"""The page `/status`, and the sentences that say who waits for whom: pure views of the state."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from broker.core.dispatch import Dispatcher
from broker.core.peers import Peer
from broker.core.records import OUTCOMES, Tally
from broker.core.state import BrokerState, gauges_of
from protocol.gauges import Gauge, table
from protocol.session import SHORT_ONLY

BROKER = table(
    [
        Gauge("generators", "peers", "connected generators"),
        Gauge("actors", "peers", "connected actors"),
        Gauge("queue_depth_segments", "segments", "segments held for the learner"),
        Gauge("queued_bytes", "bytes", "bytes of the segments held for the learner"),
        Gauge("tasks_queued", "tasks", "tasks that wait for an actor"),
        Gauge("tasks_leased", "tasks", "tasks under way"),
        Gauge("units_ready", "units", "units ready for delivery"),
        Gauge("units_leased", "units", "units that the learner has"),
        Gauge("units_committed", "units", "units that are committed and in no checkpoint yet"),
        Gauge("journal_aside_bytes", "bytes", "bytes of the committed units in the journal"),
        Gauge("ledger_stored_tokens", "tokens", "tokens stored since the run began", "total"),
        Gauge("ledger_held_tokens", "tokens", "stored tokens that have no outcome yet"),
        Gauge(
            "ledger_rolled_back_tokens",
            "tokens",
            "tokens that came back because no checkpoint covered them",
            "total",
        ),
        *(
            Gauge(f"ledger_{outcome}_tokens", "tokens", meaning, "total")
            for outcome, meaning in OUTCOMES.items()
        ),
        Gauge(
            "length_bias_tokens", "tokens", "mean length of trained trajectories minus that of all that ended"
        ),
        Gauge(
            "length_distance_tokens",
            "tokens",
            "Wasserstein-1 distance between the lengths of trained trajectories and of all that ended",
        ),
    ]
)
"""Gauges of the broker; metrics show them as ``broker/name``."""
FLEET = table(
    [
        Gauge(
            "no_capacity_seconds",
            "s",
            "time in which tasks waited and no generator served, or no actor was there",
            "total",
        ),
        Gauge(
            "wanted_generators",
            "generators",
            "generators that the run needs, as far as the broker has measured it; absent if it has not",
        ),
        Gauge("wanted_actors", "actors", "actors that the run needs, likewise"),
        Gauge("no_capacity_now_seconds", "s", "how long that has lasted now; 0 if it does not"),
    ]
)
"""Gauges of all hosts together; metrics show them as ``fleet/name``."""

HOSTS = table(
    [
        Gauge("count", "hosts", "hosts beside the learner's that are there (`offbeat host`)"),
        Gauge("joined_total", "hosts", "hosts that have joined since the broker started", "total"),
        Gauge("lost_total", "hosts", "hosts that have gone without a Goodbye", "total"),
        Gauge(
            "leases_lost_total", "tasks", "tasks that lost hosts had, and that were dealt out again", "total"
        ),
        Gauge(
            "tokens_per_second",
            "tokens/s",
            "action tokens that a host samples per second, as `hosts/tokens_per_second/NAME`; beyond 32 hosts `others`",
        ),
        Gauge(
            "policy_lag",
            "versions",
            "how far the last generator of a host is behind, as `hosts/policy_lag/NAME`; beyond 32 hosts `others`",
        ),
    ]
)
"""Gauges of hosts; metrics show them as ``hosts/name``."""


Status = Mapping[str, Any]

STILL_S = 3.0
"""Seconds of silence or standstill that are reported. Shorter ones are normal between heartbeats."""
UNIFORM_SHOWN = 4
"""Groups in a row with equal returns that are reported. Fewer are usual."""


def who_waits(status: Status) -> list[str]:
    """Return one sentence for each wait: faults first, then the learner, the actors and the generators.

    Example:
        >>> who_waits({"peers": [], "queues": {}})
        ['everybody waits for a learner: none has joined']
    """
    return [
        *_faults(status),
        *_learner(status),
        *(line for actor in _of(status, "actor") for line in _actor(status, actor)),
        *(line for generator in _of(status, "generator") for line in _generator(status, generator)),
    ]


def _faults(status: Status) -> Iterator[str]:
    journal = status.get("journal", {})
    if journal.get("blocked"):
        yield f"actors wait for the journal: {journal['blocked']}"
    if why := journal.get("why_low"):
        yield f"actors wait for room on the disk: {why}"
    if waiting := journal.get("messages_waiting"):
        yield f"{waiting} messages wait for the journal to be written"
    fleet = status.get("fleet", {})
    if fleet.get("no_capacity_s", 0.0) > STILL_S:
        queues = status.get("queues", {})
        tasks = queues.get("tasks_queued", 0) + queues.get("tasks_leased", 0)
        yield f"no capacity for {fleet['no_capacity_s']:.0f} s: {_count(tasks, 'task')} wait, {fleet['missing']}"
    if unused := fleet.get("generators_unused", 0):
        yield (
            f"{_count(unused, 'generator')} wait for more actors: the list of one actor, in one message, has no room "
            "for all"
        )
    if violation := status.get("ledger", {}).get("violation"):
        yield f"the ledger does not add up: {violation}"


def _learner(status: Status) -> Iterator[str]:
    learners, queues = _of(status, "learner"), status.get("queues", {})
    if not learners:
        yield "everybody waits for a learner: none has joined"
        return
    learner, ready = learners[0], queues.get("units_ready", 0)
    name, unit = learner["name"], status.get("delivery_unit", "unit")
    if learner["silent_s"] > STILL_S:
        yield f"everybody waits for {name}: silent for {learner['silent_s']:.1f} s"
    elif learner["busy"]:
        if ready:
            yield f"{_count(ready, unit)} wait for {name}, which is busy{_still(learner)}"
    elif not ready:
        yield f"{name} waits{_since(learner)} for {_wanted(learner, unit)}: {_why_no_units(status)}"
    elif not learner.get("delivery_credit", 1):
        yield f"{_count(ready, unit)} wait for {name} to ask for more"


def _wanted(learner: Status, unit: str) -> str:
    here, wanted = (learner.get("gauges", {}).get(name) for name in ("units_here", "units_wanted"))
    # Heartbeats are a second old: more may be here by now than the learner waited for then.
    if here is None or wanted is None or here >= wanted:
        return f"{unit}s"
    return f"{wanted - here:.0f} of {wanted:.0f} {unit}s"


def _why_no_units(status: Status) -> str:
    """Return what stands between the learner and its next batch."""
    if hopeless := _why_nothing_counts(status):
        return hopeless
    queues, actors = status.get("queues", {}), _of(status, "actor")
    leased, queued = queues.get("tasks_leased", 0), queues.get("tasks_queued", 0)
    if not leased + queued:
        return "no tasks are under way, and the learner has put no others"
    if not actors:
        return f"{_count(queued + leased, 'task')} wait for an actor, none has joined"
    parts = (
        [f"actors run {_count(leased, 'task')}"] if leased else [f"no actor has taken one of {queued} tasks"]
    )
    if leased and not status.get("generators_offered"):
        parts.append("they wait for a generator, none is well")
    else:
        still = [g for g in _of(status, "generator") if g["busy"] and g["stalled_s"] > STILL_S]
        parts += [f"actors wait for {g['name']}" for g in still]
    if incomplete := queues.get("groups_incomplete"):
        parts.append(f"of {_count(incomplete, 'group')} some members are still out")
    return "; ".join(parts)


def _why_nothing_counts(status: Status) -> str:
    """Return why episodes end and yet no batch comes together, or ""."""
    episodes = status.get("episodes", {})
    recent = episodes.get("recent", 0)
    if recent and episodes["recent_failed"] == recent:
        return f"all of the last {_count(recent, 'episode')} failed: {episodes['why']}"
    gauges: Status = next((learner.get("gauges", {}) for learner in _of(status, "learner")), {})
    if (groups := gauges.get("uniform_groups_in_a_row", 0)) >= UNIFORM_SHOWN:
        return (
            f"in each of the last {groups:.0f} groups all returns are equal (in the last one "
            f"{gauges.get('uniform_return', 0):g}), so there is nothing to learn from them"
        )
    return ""


def _actor(status: Status, actor: Status) -> Iterator[str]:
    queues, name = status.get("queues", {}), actor["name"]
    gauges, running = actor.get("gauges", {}), actor.get("leases_count", 0)
    if actor["silent_s"] > STILL_S:
        yield f"{name} is silent for {actor['silent_s']:.1f} s; its {_count(running, 'task')} wait for it"
        return
    if SHORT_ONLY in actor.get("note", ""):
        yield f"{name}: {actor['note']}"
    elif actor.get("note"):
        yield f"{name} takes no tasks: {actor['note']}"
    if gauges.get("segments_waiting") and not actor.get("segment_credit", 1):
        held, leased = queues.get("segments_held", 0), queues.get("segments_in_units_leased", 0)
        yield (
            f"{name} waits for segment credit with {gauges['segments_waiting']:.0f} segments: the broker holds {held}, "
            f"{leased} of them with the learner"
        )
    elif running and not status.get("generators_offered") and not actor.get("note"):
        yield f"{name} waits for a generator with {_count(running, 'episode')}: none is well"
    elif running and actor["busy"] and actor["stalled_s"] > STILL_S:
        yield f"{name} has {_count(running, 'episode')} without progress for {actor['stalled_s']:.1f} s"
    elif actor.get("task_credit", 0) > 0 and not queues.get("tasks_queued", 0):
        yield f"{name} waits for tasks, it has room for {_count(actor['task_credit'], 'more episode')}"


def _generator(status: Status, generator: Status) -> Iterator[str]:
    name, gauges = generator["name"], generator.get("gauges", {})
    running, held = gauges.get("running_requests", 0), gauges.get("held_requests", 0)
    version = generator.get("policy_version")
    # After a join nobody knows the version before the first heartbeat.
    behind = 0 if version is None else max(0, status.get("policy_version", 0) - version)
    if generator["silent_s"] > STILL_S:
        yield f"{name} is silent for {generator['silent_s']:.1f} s"
        return
    if generator["busy"] and generator["stalled_s"] > STILL_S:
        yield f"{name} has {_count(running, 'request')} without a step of its engine for {generator['stalled_s']:.1f} s"
    elif held:
        yield f"{_count(held, 'request')} at {name} wait for a policy version it does not have yet"
    elif not running:
        yield f"{name} idle: no requests"
    if SHORT_ONLY in generator.get("note", ""):
        yield f"{name}: {generator['note']}"
        return
    why = f": {generator['note']}" if generator.get("note") else ""
    if behind > 1 or (behind and why):
        yield f"{name} serves version {version}, {behind} behind the newest{why}"


def _of(status: Status, role: str) -> Sequence[Status]:
    return [peer for peer in status.get("peers", ()) if peer["role"] == role]


def _still(peer: Status) -> str:
    return f" without progress for {peer['stalled_s']:.1f} s" if peer["stalled_s"] > STILL_S else ""


def _since(peer: Status) -> str:
    seconds = peer.get("gauges", {}).get("waiting_seconds")
    return "" if seconds is None else f" {seconds:.1f} s"


def _count(number: float, what: str) -> str:
    """Return a number with its noun, in the plural where needed.

    Example:
        >>> _count(1, "task"), _count(3.0, "group")
        ('1 task', '3 groups')
    """
    return f"{number:.0f} {what}" + ("" if number == 1 else "s")


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
        "hosts": state.hosts.page(state.peers, dispatcher.learners.policy_version, now),
        "generators_offered": dispatcher.generators.offered,
        "queues": _queues(state),
        "fleet": {
            "no_capacity_s": round(state.capacity.spell_s, 3),
            "missing": state.capacity.missing,
            "generators_unused": dispatcher.generators.unused,
            "wanted": _wanted_of_fleet(state),
        },
        "episodes": dispatcher.actors.episodes.page(),
        "ledger": _ledger(state),
        "gauges": gauges_of(state),
        **more,
    }
    return page | {"waits": who_waits(page)}


def _wanted_of_fleet(state: BrokerState) -> dict[str, Any]:
    """Return the advice on the numbers of generators and actors; empty before the first one."""
    advice = state.advice
    if advice is None:
        return {}
    return {
        "generators": advice.counts.generators,
        "actors": advice.counts.actors,
        "reason": advice.reason,
        "measured": advice.measured,
    }


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
        "on_host": peer.hello.on_host,
        "pid": peer.hello.pid,
        "incarnation": peer.hello.incarnation,
        "leaving": peer.asked_to_leave,
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
        entry["policy_version"] = peer.heartbeat.policy_version if peer.has_beaten else None
        entry["patience_s"] = peer.heartbeat.patience_s
    return entry


def _tally(tally: Tally) -> dict[str, int]:
    return {"segments": tally.segments, "tokens": tally.tokens, "action_tokens": tally.action_tokens}
