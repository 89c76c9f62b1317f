"""What the table at the end of `offbeat train` says: the rows of a summary that a person wants to see. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from launch.supervise.summary import Summary, of_set
from launch.supervise.terminal.episodes import episodes_row, percent
from learner.trajectory import RECOMMITTED


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the rows of the table: the parts of a summary that a person wants to see."""
    lag, idle = summary["policy_lag"], summary["idle_share"]
    return [
        # A summary of an earlier version names no method.
        *([("method", str(summary["method"]))] if summary.get("method") else []),
        *held_out_rows(summary["evaluations"]),
        *best_rows(summary),
        ("steps, policy version", f"{summary['steps']}, {summary['policy_version']} ({summary['ended_by']})"),
        ("wall time", wall_time(summary)),
        ("tokens", f"{summary['tokens_generated']:,} sampled, {summary['tokens_trained']:,} trained"),
        # A summary of an earlier version has no episodes.
        *([("episodes", episodes_row(summary["episodes"]))] if "episodes" in summary else []),
        ("not trained", not_trained(summary["trajectories_by_outcome"], summary["trajectories_trained"])),
        (
            "policy lag",
            f"mean {lag['mean_versions']:.2f}, max {lag['max_versions']} versions (bound {lag['bound']})",
        ),
        ("idle share", f"learner {idle['learner']:.0%}, generator {idle['generator']:.0%}"),
        ("started again", started_again(summary["restarts"])),
        ("TensorBoard", f"tensorboard --logdir {summary['tensorboard']}"),
        ("learning curve", summary["learning_curve"]),
    ]


def best_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the row on the best evaluation, if that is not the one of the last model.

    Example:
        >>> best_rows({"best": {"step": 30, "score": 0.625, "model": "runs/a/models/best-step-000030"}, "model": "m"})
        [('best model', 'step 30, 0.625: runs/a/models/best-step-000030')]
    """
    # A summary of an earlier version names no best model.
    best = summary.get("best")
    if best is None or best["model"] in (None, summary["model"]):
        return []
    return [("best model", f"step {best['step']}, {best['score']:.3f}: {best['model']}")]


def wall_time(summary: Summary) -> str:
    """Return the time of this start, and the time of training, which includes earlier starts of the run.

    Example:
        >>> wall_time({"wall_seconds": 239.0, "training_seconds": 212.0})
        '239 s, of it 212 s training'
        >>> wall_time({"wall_seconds": 39.0, "training_seconds": 74.0, "resumed": True})
        '39 s since it was resumed; 74 s training in all'
    """
    wall, training = f"{summary['wall_seconds']:.0f} s", f"{summary['training_seconds']:.0f} s training"
    # A summary of an earlier version does not say whether the run was resumed.
    resumed = summary.get("resumed", summary["training_seconds"] > summary["wall_seconds"])
    return f"{wall} since it was resumed; {training} in all" if resumed else f"{wall}, of it {training}"


def held_out_rows(evaluations: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the rows on evaluations: the first and the last one, by accuracy and by return; none without one.

    Example:
        >>> first = {"tag": "before", "step": 0, "tasks": 64, "answered": 64, "accuracy": 0.25, "return_mean": 0.5}
        >>> held_out_rows([first, first | {"step": 10, "accuracy": 1.0, "return_mean": None}])[0]
        ('held-out accuracy', '0.250 at step 0, 1.000 at step 10 (greedy)')
        >>> held_out_rows([first | {"accuracy": None}])
        [('held-out return', '0.500 at step 0 (greedy)')]
    """
    shown = _first_and_last(of_set(evaluations, ""))
    rows = []
    for name, words in (("accuracy", "held-out accuracy"), ("return_mean", "held-out return")):
        if all(e[name] is None for e in shown):
            continue
        figures = [f"{'missing' if e[name] is None else f'{e[name]:.3f}'} at step {e['step']}" for e in shown]
        rows.append((words, f"{', '.join(figures)} (greedy)"))
    unanswered = [e for e in shown if e.get("answered", e["tasks"]) < e["tasks"]]
    rows += [(f"held-out tasks at step {e['step']}", unanswered_text(e)) for e in unanswered]
    return rows + [row for name in _names(evaluations) for row in _set_rows(name, of_set(evaluations, name))]


def _names(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for e in evaluations if (name := str(e.get("set", "")))))


def _first_and_last(evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [evaluations[i] for i in sorted({0, len(evaluations) - 1})] if evaluations else []


def _set_rows(name: str, evaluations: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the row of a named set: what its first and its last evaluation found."""
    figures = [f"{set_figures(e)} at step {e['step']}" for e in _first_and_last(evaluations)]
    shown = [(f"evaluation {name}", ", ".join(figures))]
    for e in _first_and_last(evaluations):
        if e["answered"] < e["tasks"] * e["samples"]:
            shown.append((f"answers of {name} at step {e['step']}", unanswered_text(e)))
    return shown


def set_figures(evaluation: Mapping[str, Any]) -> str:
    """Return pass@k of an evaluation in words, or its mean return if nobody says what is right.

    Example:
        >>> set_figures({"pass_at": {"1": [0.5, 0.4, 0.6], "4": [0.75, 0.6, 0.9]}, "return_mean": 1.0})
        'pass@1 0.500, pass@4 0.750'
        >>> set_figures({"pass_at": {}, "return_mean": 1.0}), set_figures({"pass_at": {}, "return_mean": None})
        ('return 1.000', 'missing')
    """
    if evaluation["pass_at"]:
        return ", ".join(f"pass@{k} {estimate[0]:.3f}" for k, estimate in evaluation["pass_at"].items())
    mean = evaluation["return_mean"]
    return "missing" if mean is None else f"return {mean:.3f}"


def unanswered_text(evaluation: Mapping[str, Any]) -> str:
    """Return how many tasks of an evaluation were answered, failed and never run.

    Example:
        >>> unanswered_text({"tasks": 64, "answered": 0, "failed": 60, "not_run": 4, "why": "KeyError: 'a' in t.py:3"})
        "0 of 64 answered, 60 failed, 4 never run: KeyError: 'a' in t.py:3"
    """
    asked = evaluation["tasks"] * evaluation.get("samples", 1)
    parts = [f"{evaluation['answered']} of {asked} answered"]
    for name, words in (("failed", "failed"), ("not_run", "never run")):
        parts += [f"{evaluation[name]} {words}"] if evaluation[name] else []
    return ", ".join(parts) + (f": {evaluation['why']}" if evaluation["why"] else "")


def not_trained(outcomes: Mapping[str, int], trained: int) -> str:
    """Return what share of the trajectories was not trained, by reason; evaluation is left out.

    Example:
        >>> not_trained({"uniform": 900, "evaluated": 64, "stale": 20}, 80)
        'uniform 90 %, stale 2 %'
    """
    reasons = {name: n for name, n in outcomes.items() if n and name not in ("evaluated", RECOMMITTED)}
    every = sum(reasons.values()) + trained
    largest = sorted(reasons.items(), key=lambda reason: -reason[1])
    return ", ".join(f"{name} {percent(n, every)}" for name, n in largest) or "none"


def started_again(restarts: Mapping[str, int]) -> str:
    """Return the number of restarts by role, in words.

    Example:
        >>> started_again({"broker": 1, "learner": 0, "actor": 3}), started_again({"actor": 0})
        ('1 broker, 3 actor', 'nobody')
    """
    return ", ".join(f"{count} {role}" for role, count in restarts.items() if count) or "nobody"
