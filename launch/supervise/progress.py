"""Text of the live line of `offbeat train`: the newest metrics, what became of episodes, who waits for whom."""

import json
import os
import re
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from launch.file_tail import FileTail
from launch.run_file.sections import RunConfig
from launch.supervise.broker_status import Answer
from protocol.failures import FailureCounts, describe

SMOOTHED_STEPS = 20
"""Learner steps that the moving means cover."""
SMOOTHED = ("rollout/return_mean", "rollout/correct_share")
MEAN = "mean/"
"""Prefix of a moving mean in the values."""
EVALUATED = "evaluation/answered_tasks"
"""Metric that a line has if it reports an evaluation on `learner.evaluation_tasks`."""
NOTE = "note"
"""Key of a line that holds a sentence for a person instead of metrics."""
_OF_A_SET = re.compile(r"evaluation/([\w-]+)/answered")
_PASS_AT = re.compile(r"evaluation/(?:[\w-]+/)?pass_at_(\d+)")


class MetricsTail:
    """Follows one file. A learner that goes back to a checkpoint replaces the file by a shorter one.

    Args:
        since: seconds of the wall clock; lines of an earlier `offbeat train` are older and are not shown.
    """

    def __init__(self, since: float = 0.0) -> None:
        self._since = since
        self._tail = FileTail()
        self._announced: Counter[tuple[float, str]] = Counter()
        self._told: set[str] = set()
        self._anew()

    def _anew(self) -> None:
        self._values: dict[str, Any] = {}
        self._recent = {name: deque[float](maxlen=SMOOTHED_STEPS) for name in SMOOTHED}
        self._seen: Counter[tuple[float, str]] = Counter()

    def read(self, path: Path) -> list[dict[str, Any]]:
        """Read what is new in the file. Return the evaluations and notes that no earlier call has returned."""
        try:
            with open(path, "rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return []

    def _read(self, file: BinaryIO) -> list[dict[str, Any]]:
        anew, lines = self._tail.take(file)
        if anew:
            self._anew()
        evaluations = [line for text in lines if (line := self._line(text)) is not None]
        if os.fstat(file.fileno()).st_mtime < self._since:
            # They were shown by the `offbeat train` that this one resumes.
            self._values = {}
            return []
        return evaluations

    def _line(self, text: bytes) -> dict[str, Any] | None:
        try:
            line = json.loads(text)
        except ValueError:
            return None
        if NOTE in line:
            told = line[NOTE] in self._told
            self._told.add(line[NOTE])
            return None if told else dict(line)
        self._values.update(line)
        for name, recent in self._recent.items():
            if name in line:
                recent.append(line[name])
        evaluated = set_of(line)
        if evaluated is None:
            return None
        if not evaluated:
            self._values["evaluation_step"] = line["step"]
            for name in ("evaluation/accuracy", "evaluation/return_mean"):
                if name not in line:
                    self._values.pop(name, None)
        key = line["step"], evaluated
        self._seen[key] += 1
        if self._seen[key] <= self._announced[key]:
            return None
        self._announced[key] += 1
        return dict(line)

    @property
    def values(self) -> dict[str, Any]:
        """Newest value of each metric, and moving means under `MEAN`; empty before the first new line."""
        if not self._values:
            return {}
        means = {MEAN + name: sum(recent) / len(recent) for name, recent in self._recent.items() if recent}
        return {**self._values, **means}


def sentence(line: dict[str, Any]) -> str:
    """Return an evaluation or a note of ``metrics.jsonl`` in words."""
    return str(line[NOTE]) if NOTE in line else evaluation_sentence(line)


def set_of(line: Mapping[str, Any]) -> str | None:
    """Return the name of the evaluation set that a line reports, "" for the unnamed one; None if it reports none.

    Example:
        >>> set_of({"evaluation/hard/answered": 8.0}), set_of({EVALUATED: 8.0}), set_of({"step": 1})
        ('hard', '', None)
    """
    if EVALUATED in line:
        return ""
    return next((match[1] for name in line if (match := _OF_A_SET.fullmatch(name))), None)


def evaluation_sentence(line: dict[str, Any]) -> str:
    """Return an evaluation's line of ``metrics.jsonl`` in words.

    Example:
        >>> counts = {"step": 10, "evaluation/answered_tasks": 63.0, "evaluation/failed_tasks": 1.0}
        >>> evaluation_sentence(counts | {"evaluation/accuracy": 0.5, "evaluation/return_mean": 0.75})
        'evaluation at step 10: held-out accuracy 0.500, return 0.750 (63 tasks answered, 1 failed)'
        >>> evaluation_sentence(counts | {"evaluation/not_run_tasks": 9.0})
        'evaluation at step 10: no result (63 tasks answered, 1 failed, 9 never run)'
        >>> hard = {"step": 10, "evaluation/hard/answered": 32.0, "evaluation/hard/accuracy": 0.5}
        >>> evaluation_sentence(hard | {"evaluation/hard/pass_at_4": 0.75})
        'evaluation hard at step 10: held-out accuracy 0.500, pass@4 0.750 (32 answers)'
    """
    name = set_of(line)
    prefix, ending = (f"evaluation/{name}/", "") if name else ("evaluation/", "_tasks")
    counts = [f"{line[f'{prefix}answered{ending}']:.0f} {'answers' if name else 'tasks answered'}"]
    for metric, words in (("failed", "failed"), ("not_run", "never run")):
        if number := line.get(f"{prefix}{metric}{ending}"):
            counts.append(f"{number:.0f} {words}")
    what = f"evaluation {name}" if name else "evaluation"
    return (
        f"{what} at step {line['step']}: {held_out(line, prefix=prefix) or 'no result'} ({', '.join(counts)})"
    )


def held_out(values: dict[str, Any], digits: int = 3, prefix: str = "evaluation/") -> str:
    """Return accuracy, pass@k and return on held-out tasks in words, as far as they are known.

    Example:
        >>> held_out({"evaluation/return_mean": 0.75}, digits=2)
        'held-out return 0.75'
    """
    tries = sorted(
        int(match[1])
        for name in values
        if name.startswith(prefix) and (match := _PASS_AT.fullmatch(name)) and "/" not in name[len(prefix) :]
    )
    words = {"accuracy": "accuracy", **{f"pass_at_{k}": f"pass@{k}" for k in tries}, "return_mean": "return"}
    means = [
        f"{word} {values[prefix + metric]:.{digits}f}"
        for metric, word in words.items()
        if prefix + metric in values
    ]
    return f"held-out {', '.join(means)}" if means else ""


SHOWN_FAILURES = 8


def percent(part: float, whole: float) -> str:
    """Return a share in percent; a small one is not shown as 0.

    Example:
        >>> percent(1, 2), percent(1, 5000), percent(0, 3)
        ('50 %', '0.02 %', '0 %')
    """
    share = 100 * part / max(1, whole)
    return f"{share:.0f} %" if share >= 1 or not share else f"{share:.1g} %"


def failing(episodes: Mapping[str, Any]) -> str:
    """Return what share of the episodes that ended last failed, and why; "" if none did.

    Args:
        episodes: section of `/status`; empty if the broker does not have it.

    Example:
        >>> failing({"recent": 64, "recent_failed": 64, "why": "KeyError: 'answer' in my_task.py:23"})
        " | failed 100 %: KeyError: 'answer' in my_task.py:23"
    """
    if not episodes.get("recent_failed"):
        return ""
    return f" | failed {percent(episodes['recent_failed'], episodes['recent'])}: {episodes['why']}"


def episodes_row(episodes: Mapping[str, Any]) -> str:
    """Return how many episodes ended, what share of them failed, and why.

    Example:
        >>> episodes_row({"episodes": 640, "failed": 0, "failures": []})
        '640, none failed'
        >>> kind = {"kind": "KeyError", "message": "'a'", "place": "t.py:3", "fault": True, "count": 320}
        >>> episodes_row({"episodes": 640, "failed": 320, "failures": [kind]})
        "640, failed 50 %: KeyError: 'a' in t.py:3"
    """
    failures = FailureCounts.from_rows(episodes["failed"], episodes["failures"])
    if not failures.total:
        return f"{episodes['episodes']:,}, none failed"
    return f"{episodes['episodes']:,}, failed {percent(failures.total, episodes['episodes'])}: {failures.sentence()}"


def episodes_lines(episodes: Mapping[str, Any]) -> list[str]:
    """Return the lines on episodes: how many ended, what share failed, and each kind of failure with its count."""
    if not episodes.get("ended") and not episodes.get("interrupted"):
        return []
    failed = f"{episodes['failed']:,} failed"
    if episodes["failed"]:
        failed += (
            f", {percent(episodes['recent_failed'], episodes['recent'])} of the last {episodes['recent']}"
        )
    lines = [f"episodes {episodes['ended']:,} ended, {failed}"]
    for row in episodes["failures"][:SHOWN_FAILURES]:
        (failure, count) = next(FailureCounts.from_rows(0, [row]).most_frequent())
        lines.append(f"  {count:,} failed: {describe(failure)}")
    if episodes["interrupted"]:
        lines.append(
            f"  {episodes['interrupted']:,} interrupted, and run again: {episodes['interrupted_why']}"
        )
    return lines


MOST = 0.5
"""Share of failed episodes from which on they are the reason why nothing was trained."""


def nothing_trained(ended_by: str, episodes: Mapping[str, Any]) -> str:
    """Return the last line of a run that ended before its first step, with the reason as far as it is known.

    Args:
        ended_by: what ended it.
        episodes: section of the learner's result; a result of an earlier version has none.

    Example:
        >>> nothing_trained("Ctrl-C", {"episodes": 8, "failed": 0, "failures": [], "groups": 2, "uniform_groups": 2})
        'ended before the first step: Ctrl-C; nothing was trained, because all 2 groups had equal returns'
        >>> nothing_trained("Ctrl-C", {})
        'ended before the first step: Ctrl-C; nothing was trained'
    """
    text = f"ended before the first step: {ended_by}; nothing was trained"
    groups, ended = episodes.get("groups", 0), episodes.get("episodes", 0)
    if ended and episodes["failed"] >= MOST * ended:
        failures = FailureCounts.from_rows(episodes["failed"], episodes["failures"])
        return f"{text}, because {percent(failures.total, ended)} of episodes failed: {failures.sentence()}"
    if groups and groups == episodes["uniform_groups"]:
        return f"{text}, because all {groups} groups had equal returns"
    return text


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
    right, reward = m.get(MEAN + "rollout/correct_share"), m.get(MEAN + "rollout/return_mean")
    given = m.get("learner/given_loss_nats")
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
        f"{'' if reward is None else f'reward {reward:.3f}'}"
        f"{'' if right is None else f' right {right:.2f}'}"
        f"{'' if reward is None and right is None else ' | '}"
        f"{'' if given is None else f'given {given:.3f} nats | '}"
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
