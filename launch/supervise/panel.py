"""The live line of `offbeat train`, and the table at its end."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.run_file.sections import RunConfig
from launch.supervise.broker_status import Answer
from launch.supervise.episodes import episodes_row, failing, percent
from launch.supervise.metrics_tail import MEAN, SMOOTHED_STEPS, MetricsTail, held_out, sentence, set_of
from launch.supervise.sample_lines import evaluation_samples, sample_lines
from launch.supervise.summary import Summary, of_set
from learner.run_files import METRICS
from learner.samples.sample import newest_samples
from learner.units import RECOMMITTED

PLAIN_INTERVAL_S = 5.0
PLAIN_STILL_S = 30.0
"""Interval of plain lines while processes start, and while no learner step ends."""
PLAIN_COLUMNS = 160
"""Columns of samples where the output is not a terminal."""
MARGIN = " " * 10
"""Beginning of a line that belongs to the line above it."""
STILL_S = 10.0
"""Seconds without a learner step after which the line says who waits for whom."""
HEADER = f"progress: reward and right are means over the last {SMOOTHED_STEPS} steps, lag and tok/s the last step's"


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


class Panel:
    """Writes progress to standard output: a live line on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = Console(soft_wrap=True, highlight=False)
        self._status = self._console.status("starting") if self._console.is_terminal else None
        self._started = self._training_since = time.monotonic()
        self._tail = MetricsTail(time.time())
        self._seen_step = self._step = 0
        self._stepped = self._started
        self._printed, self._printed_step, self._line = 0.0, -1, ""
        self._answer: Answer | None = None
        if self._status:
            self._status.start()

    def note(self, text: str) -> None:
        """Print a line that stays.

        If the output is a file on a full disk, the line is lost, but the run goes on.
        """
        self._print(f"[{time.monotonic() - self._started:5.0f} s] {text}")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False, emoji=False)

    @property
    def _width(self) -> int:
        """Columns that are free behind the margin."""
        return (self._console.width if self._console.is_terminal else PLAIN_COLUMNS) - len(MARGIN)

    def stage(self, text: str, seconds: float) -> None:
        """Show what is done before the roles start: in the live line, or once where there is none.

        Args:
            seconds: time since it began.
        """
        if self._status:
            self._status.update(Text(f"{text}, {seconds:.0f} s"))
        elif text != self._line:
            self._line = text
            self.note(text)

    def joined(self, sentences: Sequence[str], all_joined: str) -> None:
        """Say who has joined: a line for each where the output is not a terminal, else one line for all.

        Args:
            sentences: one for each process that has joined since the last call.
            all_joined: sentence for all of them; "" while one is missing.
        """
        if self._status is None:
            for sentence in sentences:
                self.note(sentence)
        elif sentences and all_joined:
            self.note(all_joined)

    def heard(self, answer: Answer) -> None:
        """Take the broker's newest answer, or its silence."""
        self._answer = answer

    def update(
        self,
        folder: Path,
        config: RunConfig,
        *,
        restarts: Mapping[str, int],
        starting: str = "",
        last: bool = False,
    ) -> None:
        """Refresh the live line from the run folder.

        Args:
            starting: who has not joined yet, see `Starting.text`.
        """
        now = time.monotonic()
        for news in self._tail.read(folder / METRICS):
            self.note(sentence(news))
            if (name := set_of(news)) is not None:
                for sample in evaluation_samples(newest_samples(folder), news["step"], name):
                    self._print("\n".join(MARGIN + line for line in sample_lines(sample, self._width)))
        metrics = self._tail.values
        same_step = metrics.get("step", 0) == self._printed_step
        interval_s = PLAIN_STILL_S if starting or same_step else PLAIN_INTERVAL_S
        if not last and now - self._printed < (0.5 if self._status else interval_s):
            return
        if not self._seen_step and "learner/policy_version" in metrics:
            self._training_since, self._seen_step = now, metrics["step"]
            self.note(HEADER)
        if metrics.get("step", 0) != self._step:
            self._step, self._stepped = metrics.get("step", 0), now
        metrics["first_step"], metrics["all_joined"] = self._seen_step, not starting
        if self._answer is not None and self._answer.status is not None:
            metrics["episodes"] = self._answer.status.get("episodes", {}).get("ended", 0)
            metrics["evaluating"] = evaluates(self._answer.status)
        line = progress_line(metrics, config, now - self._training_since)
        line += f" | {starting}" if starting else ""
        # While processes start, everybody waits for them, and the line says so already.
        still_s = 0.0 if starting and not self._seen_step else now - self._stepped
        line += trailer(restarts, None if last else self._answer, still_s)
        self._printed, self._printed_step = now, self._step
        if self._status and not last:
            # An error's text may hold what rich takes for marks.
            self._status.update(Text(line))
        elif line != self._line or not last:
            self._line = line
            self.note(line)

    def show(self, summary: Summary) -> None:
        """Print the table at the end."""
        table = Table(title=f"run {summary['run']}", show_header=False)
        for name, value in summary_rows(summary):
            # Errors of the user's code are not markup.
            table.add_row(name, Text(value))
        self._console.print(table)

    def __enter__(self) -> "Panel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the live line."""
        if self._status:
            self._status.stop()


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
