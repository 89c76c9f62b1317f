"""What the live line of `offbeat train` says: how far the run is, and who waits for whom. Pure."""

from collections.abc import Mapping
from typing import Any

from launch.run_file.sections import RunConfig
from launch.supervise.broker_status import Answer
from launch.supervise.terminal.episodes import failing
from launch.supervise.terminal.metrics_tail import MEAN, held_out

STILL_S = 10.0
"""Seconds without a learner step after which the line says who waits for whom."""


def progress_line(m: dict[str, Any], config: RunConfig, elapsed_s: float) -> str:
    """Return one line: version, moving mean of the reward, last evaluation, lag, speed, queue, time left.

    Args:
        m: values of `MetricsTail`, and ``first_step``, ``episodes``, ``all_joined``, ``evaluating``.

    Example:
        >>> from launch.run_file.load import check
        >>> c = check({"model": {"path": "m"}, "env": {"name": "calculator"}}, "doc")
        >>> progress_line({}, c, 3.0)
        'starting the roles, 3 s'
        >>> progress_line({"all_joined": True}, c, 130.0)
        'before the first step, 130 s'
        >>> progress_line({"all_joined": True, "evaluating": True}, c, 130.0)
        'evaluation before the first step, 130 s'
        >>> progress_line({"evaluating": True}, c, 3.0)
        'starting the roles, 3 s'
    """
    evaluated = held_out(m, digits=2)
    # The metrics of a run that an earlier version began have no counts of tasks, and so no step of the evaluation.
    if evaluated and (step := m.get("evaluation_step")) is not None:
        evaluated = f"{evaluated} at step {step}"
    if "learner/policy_version" not in m:
        first = "before the first step" if config.learner.steps else "evaluating"
        if m.get("evaluating") and config.learner.steps:
            first = f"evaluation {first}"
        stage = first if m.get("episodes") or m.get("all_joined") else "starting the roles"
        return " | ".join(filter(None, (f"{stage}, {elapsed_s:.0f} s", evaluated)))
    step, steps = m["step"], config.learner.steps
    done = step - m.get("first_step", step)
    left = ""
    if done > 0:
        seconds = int(
            max(0.0, min(elapsed_s / done * (steps - step), config.run.max_minutes * 60 - elapsed_s))
        )
        left = f" | {seconds // 60}:{seconds % 60:02d} left"
    right = m.get(MEAN + "rollout/correct_share")
    speed = (
        f" | {m.get('generator/tokens_per_second', 0):.0f} tok/s sampled, "
        f"{m.get('learner/trained_tokens_per_second', 0):.0f} trained | "
        f"queue {m.get('broker/queue_depth_segments', 0):.0f}{left}"
    )
    # Nothing is sampled for training then, and the figures of speed are of a time that is over.
    if step >= steps:
        evaluates_last = config.learner.evaluation_tasks and m.get("evaluation_step") != step
        speed = " | last evaluation" if evaluates_last else ""
    elif m.get("evaluating"):
        speed = " | evaluation"
    return (
        f"step {step}/{steps} v{m['learner/policy_version']:.0f} | "
        f"reward {m.get(MEAN + 'rollout/return_mean', float('nan')):.3f}"
        f"{'' if right is None else f' right {right:.2f}'} | "
        f"{evaluated}{' | ' if evaluated else ''}"
        f"lag {m.get('learner/policy_lag_mean_versions', 0):.1f} "
        f"(max {m.get('learner/policy_lag_max_versions', 0):.0f}){speed}"
    )


def evaluates(status: Mapping[str, Any]) -> bool:
    """Return whether the learner waits for the answers of an evaluation.

    Example:
        >>> waits = {"role": "learner", "gauges": {"waiting_seconds": 3.0}}
        >>> evaluates({"peers": [waits]}), evaluates({"peers": [waits | {"gauges": {}}]})
        (True, False)
    """
    # A learner that waits for a batch says how many units it wants.
    return any(
        peer["role"] == "learner"
        and "waiting_seconds" in peer.get("gauges", {})
        and "units_wanted" not in peer["gauges"]
        for peer in status.get("peers", ())
    )


def trailer(restarts: Mapping[str, int], answer: Answer | None, still_s: float) -> str:
    """Return what a run with problems adds to its line: restarts, failures, and who waits for whom.

    Args:
        still_s: seconds since the last step.

    Example:
        >>> trailer({"broker": 0, "generator": 2}, Answer(0.0, None, "refused"), 1.0)
        ' | started again: generator 2 | the broker does not answer'
        >>> waits = ["everybody waits for a learner: none has joined"]
        >>> trailer({"broker": 0}, Answer(0.0, {"waits": waits}), STILL_S + 1)
        ' | everybody waits for a learner: none has joined'
        >>> trailer({}, Answer(0.0, {"waits": waits, "journal": {"why_low": "40 MB free"}}), 0.0)
        ' | disk low: 40 MB free'
    """
    again = ", ".join(f"{role} {count}" for role, count in restarts.items() if count)
    text = f" | started again: {again}" if again else ""
    if answer is not None and answer.status is None:
        return f"{text} | the broker does not answer"
    if answer is not None and answer.status is not None:
        text += failing(answer.status.get("episodes", {}))
        waits = answer.status["waits"]
        low = answer.status.get("journal", {}).get("why_low", "")
        # A disk that is nearly full stops the run, so it is named at once and in its own words.
        shown = [f"disk low: {low}"] if low else waits[:1] if still_s > STILL_S else []
        text += "".join(f" | {line}" for line in shown)
    return text
