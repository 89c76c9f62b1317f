"""Is it learning, and what limits it? One sentence of state, alarms before advice, processes. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from launch.supervise.summary import generator_idle_share, standard_error
from launch.view.run_reader import Columns, Process, RunFiles, changed_settings
from learner.gauges import STOOD

RECENT = 10
"""Learner steps that the sentence and the alarms look at."""
BUSY, IDLE = 0.9, 0.3
"""Share of the time from which on a role counts as the one that limits, or as one that waits."""
STALE_SHARE = 0.05
FAILED_SHARE = 0.2
UNIFORM_SHARE = 0.8
LEAST_ESS = 0.5
CLIPPED_SHARE = 0.3
FALL_ERRORS = 2.0
"""Standard errors by which an evaluation has to differ from another one, so that it is not called chance."""
DISK_FACTOR = 4


@dataclass(frozen=True)
class Finding:
    """Something that a person should look at."""

    kind: Literal["alarm", "advice"]
    title: str
    value: str
    threshold: str
    docs: str
    """Page of docs/, with its anchor."""


def overview(files: RunFiles) -> dict[str, Any]:
    """Return the overview of a run as plain data."""
    found = alarms(files)
    return {
        "run": files.name,
        "state": files.state,
        "over": files.why_over,
        "sentence": sentence(files),
        "alarms": [asdict(alarm) for alarm in found],
        # An alarm comes first: tuning a run that is broken helps nobody.
        "advice": [] if found else [asdict(finding) for finding in advice(files)],
        "evaluations": evaluations(files.evaluations),
        "processes": processes(files),
        "settings": None if files.config is None else changed_settings(files.config),
        "notes": [{"step": note.step, "text": note.text, "at": note.at} for note in files.notes[-100:]],
        "bound": files.bound,
        "clock": has_clock(files.steps),
    }


def has_clock(steps: Columns) -> bool:
    """Return whether the lines of the metrics say when they were written."""
    return steps.last("time") is not None


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None without a value.

    Example:
        >>> mean([1.0, 2.0]), mean([])
        (1.5, None)
    """
    return sum(values) / len(values) if values else None


def recent_mean(steps: Columns, name: str, count: int = RECENT) -> float | None:
    """Return the mean of the newest values of a metric; None if there is none."""
    return mean(steps.recent(name, count))


def percent(share: float | None) -> str:
    """Return a share as a person reads it.

    Example:
        >>> percent(0.974), percent(0.0512), percent(None)
        ('97 %', '5.12 %', '—')
    """
    if share is None or math.isnan(share):
        return "—"
    return f"{share * 100:.3g} %" if share < 0.1 else f"{share * 100:.0f} %"


# --- the sentence -------------------------------------------------------------------------------------------


def idle_of_generators(steps: Columns) -> float | None:
    """Return the share of the last steps in which generators had no request; None if nobody measured it."""
    names = ("generator/idle_seconds_total", "generator/serving_seconds_total")
    if not all(name in steps for name in names):
        return recent_mean(steps, "generator/idle_share")
    columns = [steps[name][-RECENT - 1 :] for name in names]
    rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    rows = [row for row in rows if not any(math.isnan(value) for value in row.values())]
    return generator_idle_share(rows) if len(rows) > 1 else recent_mean(steps, "generator/idle_share")


def sentence(files: RunFiles) -> str:
    """Return in one or two sentences how far the run is, and which role limits it."""
    steps = files.steps
    step = steps.last("step")
    goal = files.config.learner.steps if files.config is not None else None
    state = {"running": "The run goes on", "ended": "The run has ended", "broken off": "The run broke off"}[
        files.state
    ]
    if step is None:
        return f"{state}; it has made no learner step yet."
    where = f"{state} at step {step:.0f}" + (f" of {goal}" if goal else "")
    return f"{where}. {learning(files)} {limit(steps)}".strip()


def learning(files: RunFiles) -> str:
    """Say how reward and held-out results have moved, with the size of chance."""
    parts = []
    rewards = [value for value in files.steps["rollout/return_mean"] if not math.isnan(value)]
    if len(rewards) >= 2 * RECENT:
        first, last = mean(rewards[:RECENT]), mean(rewards[-RECENT:])
        parts.append(f"the reward went from {first:.3g} to {last:.3g} (means of {RECENT} steps)")
    shown = [e for e in evaluations(files.evaluations) if e["set"] == ""]
    scored = [e for e in shown if e["accuracy"] is not None]
    if len(scored) > 1:
        begun, newest = scored[0], scored[-1]
        parts.append(
            f"held-out accuracy from {begun['accuracy']:.3g} to {newest['accuracy']:.3g} "
            f"(± {newest['error']:.2g}): {verdict(begun, newest)}"
        )
    if not parts:
        return (
            f"Too early to say whether it learns: of {2 * RECENT} steps with a reward there are {len(rewards)}, and of "
            f"two evaluations {len(scored)}."
        )
    text = ", and ".join(parts)
    return text[0].upper() + text[1:] + "."


def verdict(begun: Mapping[str, Any], newest: Mapping[str, Any]) -> str:
    """Say whether the accuracy of two evaluations differs by more than `FALL_ERRORS` standard errors.

    The error of the difference is √(a² + b²), with the errors a and b of both. It is too large where both have the same
    tasks, so a change that is called real is real.

    Example:
        >>> verdict({"accuracy": 0.2, "error": 0.03}, {"accuracy": 0.4, "error": 0.04})
        'it learns, by 4.0 standard errors'
        >>> verdict({"accuracy": 0.2, "error": 0.03}, {"accuracy": 0.22, "error": 0.04})
        'that may be chance, 0.4 standard errors'
        >>> verdict({"accuracy": 0.0, "error": 0.0}, {"accuracy": 0.0, "error": 0.0})
        'no change'
    """
    change = newest["accuracy"] - begun["accuracy"]
    error = math.hypot(begun["error"], newest["error"])
    if not change:
        return "no change"
    errors = abs(change) / error if error else math.inf
    size = f"{errors:.1f} standard errors" if math.isfinite(errors) else "all answers changed"
    if errors < FALL_ERRORS:
        return f"that may be chance, {size}"
    return f"{'it learns' if change > 0 else 'it gets worse'}, by {size}"


def limit(steps: Columns) -> str:
    """Say which role the others wait for, and the most that a second one of it could give.

    With a share i of idle time at the other role, its speed could rise by a factor of 1/(1 - i) at most, and a second
    process of one role gives a factor of 2 at most; the smaller of both is the bound.
    """
    learner, generators = recent_mean(steps, "learner/idle_share"), idle_of_generators(steps)
    if learner is None or generators is None:
        return ""
    times = f"learner busy {percent(1 - learner)}, generators idle {percent(generators)} of the last {RECENT} steps"
    if 1 - learner >= BUSY and generators > 0.02:
        most = min(2.0, 1 / max(1e-9, 1 - generators)) - 1
        return f"The learner limits: {times}. A second one would give at most {percent(most)} more."
    if learner > 1 - BUSY and generators < IDLE:
        most = min(2.0, 1 / max(1e-9, 1 - learner)) - 1
        return f"The generators limit: {times}. A second one would give at most {percent(most)} more."
    return f"Nobody limits alone: {times}."


# --- alarms and advice --------------------------------------------------------------------------------------


def alarms(files: RunFiles) -> list[Finding]:
    """Return what is wrong, the most serious first."""
    steps = files.steps
    found: list[Finding] = []

    def alarm(title: str, value: str, threshold: str, docs: str) -> None:
        found.append(Finding("alarm", title, value, threshold, docs))

    if files.state == "broken off" and files.config_text:
        alarm(
            "The run broke off without a summary",
            "; ".join(files.why_over) or "no process of it is left",
            "a run ends with summary.json",
            "run/operations.md",
        )
    if (differs := ledger_difference(steps)) is not None and differs:
        alarm(
            "The ledger does not close", f"{differs:+,.0f} tokens", "0 tokens", "understand/exactly-once.md"
        )
    for process in files.processes:
        if restarts := process.restarts:
            alarm(
                f"{process.where} was started again",
                f"{'once' if restarts == 1 else f'{restarts} times'}; "
                f"at last: {process.reason or 'no reason is known'}",
                "0 restarts",
                "run/reliability.md",
            )
    if skipped := steps.last("learner/skipped_steps"):
        alarm(
            "Steps were skipped",
            f"{skipped:.0f}: loss or gradient was not finite",
            "0 steps",
            "run/metrics.md",
        )
    found += _alarms_of_training(files)
    least = files.config.broker.journal.min_free_bytes if files.config is not None else 0
    free = files.disk_free_bytes
    if files.state == "running" and free is not None and free < DISK_FACTOR * least:
        alarm(
            "The disk is nearly full",
            f"{free / 1e9:.2f} GB free",
            f"{DISK_FACTOR * least / 1e9:.2f} GB",
            "run/operations.md",
        )
    return found


def _alarms_of_training(files: RunFiles) -> list[Finding]:
    steps, found = files.steps, list[Finding]()

    def alarm(title: str, value: str, threshold: str, docs: str) -> None:
        found.append(Finding("alarm", title, value, threshold, docs))

    uniform = uniform_share(files)
    if uniform is not None and uniform > UNIFORM_SHARE:
        alarm(
            "Hardly a group trains: the returns in a group are equal",
            f"{percent(uniform)} of the trajectories of the last {RECENT} steps",
            f"{percent(UNIFORM_SHARE)}",
            "understand/curriculum.md",
        )
    failed = recent_mean(steps, "rollout/failed_share")
    if failed is not None and failed > FAILED_SHARE:
        alarm(
            "Episodes fail",
            f"{percent(failed)} of the last {RECENT} steps",
            percent(FAILED_SHARE),
            "run/metrics.md",
        )
    stale = stale_share(files)
    if stale is not None and stale > STALE_SHARE:
        lag = recent_mean(steps, "learner/policy_lag_mean_versions")
        alarm(
            "Tokens are too stale: the lag is at its bound",
            f"{percent(stale)} of the last {RECENT} steps' action tokens were dropped or masked; "
            f"mean lag {'—' if lag is None else f'{lag:.2f}'} of {files.bound}",
            percent(STALE_SHARE),
            "understand/policy-lag.md",
        )
    ess = recent_mean(steps, "learner/effective_sample_size")
    if ess is not None and ess < LEAST_ESS:
        alarm(
            "Ratios are beyond their limit: few tokens carry the weight",
            f"effective share {percent(ess)}",
            f"at least {percent(LEAST_ESS)}",
            "run/metrics.md",
        )
    clipped = recent_mean(steps, "learner/clip_fraction")
    if clipped is not None and clipped > CLIPPED_SHARE:
        alarm(
            "The clip cuts off much of the gradient",
            percent(clipped),
            percent(CLIPPED_SHARE),
            "run/metrics.md",
        )
    if fallen := evaluation_falls(files):
        alarm(
            "The held-out result falls while the reward rises",
            fallen,
            f"{FALL_ERRORS:g} standard errors below the best",
            "understand/evaluation.md",
        )
    return found


def ledger_difference(steps: Columns) -> float | None:
    """Return the tokens stored, less those held and those with an outcome; None without a ledger."""
    stored, held = steps.last("broker/ledger_stored_tokens"), steps.last("broker/ledger_held_tokens")
    if stored is None or held is None:
        return None
    outcomes = [n for n in steps.names if n.startswith("broker/ledger_") and n.endswith("_tokens")]
    outside = ("stored", "held", "rolled_back")
    outcomes = [
        n for n in outcomes if n.removeprefix("broker/ledger_").removesuffix("_tokens") not in outside
    ]
    return stored - held - sum(steps.last(name) or 0.0 for name in outcomes)


def uniform_share(files: RunFiles) -> float | None:
    """Return the share of recent trajectories whose group had equal returns; None without counts."""
    counts = files.steps.recent("rollout/uniform_trajectories", RECENT + 1)
    if len(counts) < 2 or files.config is None:
        return None
    left_out = sum(max(0.0, after - before) for before, after in pairwise(counts))
    trained = files.config.learner.batch_trajectories * (len(counts) - 1)
    return left_out / max(1.0, left_out + trained)


def stale_share(files: RunFiles) -> float | None:
    """Return the share of recent action tokens that were masked as too old, or dropped with their trajectory."""
    masked = recent_mean(files.steps, "learner/stale_token_fraction")
    counts = files.steps.recent("rollout/stale_trajectories", RECENT + 1)
    if masked is None or files.config is None:
        return masked
    dropped = sum(max(0.0, after - before) for before, after in pairwise(counts))
    trained = files.config.learner.batch_trajectories * max(1, len(counts) - 1)
    share = dropped / max(1.0, dropped + trained)
    return share + (1 - share) * masked


def evaluation_falls(files: RunFiles) -> str:
    """Say how the held-out accuracy has fallen from its best although the reward rose since; "" if it has not."""
    shown = [e for e in evaluations(files.evaluations) if e["set"] == "" and e["accuracy"] is not None]
    if len(shown) < 3:
        return ""
    best, last = max(shown, key=lambda e: e["accuracy"]), shown[-1]
    error = math.hypot(best["error"], last["error"])
    if last["accuracy"] >= best["accuracy"] - FALL_ERRORS * error:
        return ""
    rewards = [
        (step, value)
        for step, value in zip(files.steps["step"], files.steps["rollout/return_mean"], strict=True)
        if not math.isnan(value)
    ]
    then = mean([value for step, value in rewards if step <= best["step"]][-RECENT:])
    now = mean([value for _, value in rewards[-RECENT:]])
    if then is None or now is None or now <= then:
        return ""
    return (
        f"{best['accuracy']:.3g} at step {best['step']:.0f}, {last['accuracy']:.3g} at step {last['step']:.0f}; "
        f"reward {then:.3g} then, {now:.3g} now"
    )


def advice(files: RunFiles) -> list[Finding]:
    """Return what may make a sound run faster."""
    steps, found = files.steps, list[Finding]()

    def tip(title: str, value: str, threshold: str, docs: str) -> None:
        found.append(Finding("advice", title, value, threshold, docs))

    learner, generators = recent_mean(steps, "learner/idle_share"), idle_of_generators(steps)
    if learner is not None and learner > IDLE:
        tip(
            "The learner waits for trajectories: add generators or actors",
            f"idle {percent(learner)}",
            percent(IDLE),
            "run/capacity.md",
        )
    if generators is not None and generators > IDLE:
        tip(
            "Generators stand idle: the learner is the bottleneck, or too few episodes run",
            f"idle {percent(generators)}",
            percent(IDLE),
            "run/capacity.md",
        )
    waiting, cache = (
        recent_mean(steps, "generator/waiting_requests"),
        recent_mean(steps, "generator/kv_cache_share"),
    )
    if waiting and cache is not None and cache > 0.9:
        tip(
            "The KV cache is too small",
            f"{percent(cache)} in use, {waiting:.1f} requests wait",
            "90 %",
            "run/metrics.md",
        )
    padding = recent_mean(steps, "learner/padding_fraction")
    if padding is not None and padding > 0.3:
        tip("Much of the learner's work is padding", percent(padding), "30 %", "run/profiling.md")
    return found


# --- tables -------------------------------------------------------------------------------------------------


def evaluations(columns: Columns) -> list[dict[str, Any]]:
    """Return all evaluations: set, step, accuracy with its error, return, counts, and how long the learner stood."""
    found = []
    sets = {
        "": (
            "evaluation/accuracy",
            "evaluation/return_mean",
            "evaluation/answered_tasks",
            f"evaluation/{STOOD}",
        )
    }
    for name in columns.names:
        if name.startswith("evaluation/") and name.endswith("/answered"):
            base = name.removesuffix("answered")
            sets[name.split("/")[1]] = (f"{base}accuracy", f"{base}return_mean", name, base + STOOD)
    of_sets = {of_set: [columns[name] for name in names] for of_set, names in sets.items()}
    step, time = columns["step"], columns["time"]
    for row in range(columns.rows):
        for of_set, (accuracy, return_mean, answered, stood) in of_sets.items():
            tasks, solved = answered[row], accuracy[row]
            if math.isnan(tasks):
                continue
            entry = {"accuracy": solved, "answered": tasks}
            found.append(
                {
                    "set": of_set,
                    "step": step[row],
                    "at": number(time[row]),
                    "accuracy": number(solved),
                    "error": None if math.isnan(solved) else standard_error(entry),
                    "return": number(return_mean[row]),
                    "answered": tasks,
                    "stood": number(stood[row]),
                }
            )
    return found


def state_of(files: RunFiles, process: Process) -> str:
    """Return what a process does now: it works, has ended with run or host, or is missing though the run goes on."""
    if process.alive and (process.supervised or not process.host):
        return "works"
    if files.state != "running":
        return "ended with the run" if files.state == "ended" else "ended when the run broke off"
    if process.alive is None:
        return f"unknown here: it runs on {process.machine or process.host}"
    return "is missing" if process.supervised or not process.host else "ended with its host"


def number(value: float) -> float | None:
    """Return a number, or None for one that is missing or not finite."""
    return value if math.isfinite(value) else None


def processes(files: RunFiles) -> list[dict[str, Any]]:
    """Return the processes that supervisors know, by host: whether they live, restarts with their reasons."""
    return [
        {
            "host": process.host,
            "name": process.name,
            "pid": process.pid or None,
            "state": state_of(files, process),
            "restarts": process.restarts,
            "reason": process.reason,
            "started": process.started,
            "endings": process.endings,
        }
        for process in files.processes
    ]
