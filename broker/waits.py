"""Sentences that say who waits for whom: a pure view of `/status`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    if here is None or wanted is None:
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
    if actor.get("note"):
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
    behind = status.get("policy_version", 0) - generator.get("policy_version", 0)
    if generator["silent_s"] > STILL_S:
        yield f"{name} is silent for {generator['silent_s']:.1f} s"
        return
    if generator["busy"] and generator["stalled_s"] > STILL_S:
        yield f"{name} has {_count(running, 'request')} without a step of its engine for {generator['stalled_s']:.1f} s"
    elif held:
        yield f"{_count(held, 'request')} at {name} wait for a policy version it does not have yet"
    elif not running:
        yield f"{name} idle: no requests"
    why = f": {generator['note']}" if generator.get("note") else ""
    if behind > 1 or (behind and why):
        yield f"{name} serves version {generator.get('policy_version', 0)}, {behind} behind the newest{why}"


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
