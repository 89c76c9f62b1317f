"""Logs for Inspect View: samples of a run as the JSON logs that inspect_ai reads, written without inspect_ai.

A log has the samples of one learner step, or of one evaluation of held-out tasks. Format: EvalLog, version 2, of
https://inspect.aisi.org.uk/reference/inspect_ai.log.html
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from launch.errors import LaunchError
from learner.samples import Sample, answer_of, facts, prompt_of
from protocol.files import write_whole

VERSION = 2
ROLES = {"prompt": "user", "answer": "assistant", "observation": "user", "left_out": "user"}
"""Role of each part of a sample. A prompt has all messages before the first answer in one text."""
RETURN = "return"
MEAN = "mean_of_kept_samples"
"""Name of the only metric. A run keeps a few samples of a step, chosen as best, worst and at random."""


def write_inspect_logs(samples: Iterable[Sample], folder: Path, run: str) -> str:
    """Write samples as logs, one for each step and each evaluation. Return a line about the result.

    Args:
        run: name of the run.

    Raises:
        LaunchError: the folder cannot be written.
    """
    groups: dict[tuple[str, int, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.split, sample.step, sample.evaluation), []).append(sample)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for (split, step, evaluation), members in groups.items():
            what = f"heldout-{evaluation}" if split == "heldout" else "train"
            log = inspect_log(members, run=run, task=f"{what}-step-{step:06d}")
            write_whole(folder / log_name(log), json.dumps(log), durable=False)
    except OSError as error:
        raise LaunchError(f"--inspect {folder}: {error.strerror}") from None
    count = sum(map(len, groups.values()))
    return (
        f"{folder}: {count} samples in {len(groups)} logs; look at them with: inspect view --log-dir {folder}"
    )


def log_name(log: dict[str, Any]) -> str:
    """Return the name of a log's file, which Inspect View takes time, task and id from."""
    spec = log["eval"]
    task = re.sub(r"[^A-Za-z0-9.-]+", "-", spec["task"])[:120]
    return f"{spec['created'].replace(':', '-')}_{task}_{spec['task_id']}.json"


def inspect_log(samples: Sequence[Sample], *, run: str, task: str) -> dict[str, Any]:
    """Return the log of some samples.

    Example:
        >>> sample = Sample(step=1, policy_version=0, split="train", env="e", task="1g0.0", group="1g0", return_=1.0)
        >>> inspect_log([sample], run="r", task="train-step-000001")["results"]["scores"][0]["metrics"][MEAN]["value"]
        1.0
    """
    at = max((sample.time or 0.0 for sample in samples), default=0.0)
    # Equal samples give equal ids, so that a second call replaces the files of the first.
    ident = hashlib.blake2b(f"{run}\0{task}".encode(), digest_size=11).hexdigest()
    entries, seen = [], Counter[str]()
    for sample in samples:
        seen[sample.task] += 1
        entries.append(_entry(sample, epoch=seen[sample.task], model=f"offbeat/{run}"))
    created = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    return {
        "version": VERSION,
        "status": "success",
        "eval": {
            "created": created,
            "eval_id": ident,
            "run_id": ident,
            "task": task,
            "task_id": ident,
            "dataset": {
                "name": ", ".join(dict.fromkeys(sample.env for sample in samples)),
                "samples": len(seen),
                "sample_ids": list(seen),
            },
            "model": f"offbeat/{run}",
            "config": {"epochs": max(seen.values(), default=1)},
            "metadata": {"run": run, "step": samples[0].step if samples else None},
        },
        "plan": {"name": "offbeat", "steps": []},
        "results": {
            "total_samples": len(entries),
            "completed_samples": sum("error" not in entry for entry in entries),
            "scores": _results(samples),
        },
        "stats": {"started_at": created, "completed_at": created},
        "samples": entries,
    }


def _results(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the mean of each reward, and of the return, over the samples that were kept."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        if not sample.failed:
            for name, value in _scores(sample).items():
                values.setdefault(name, []).append(value)
    return [
        {
            "name": name,
            "scorer": name,
            "scored_samples": len(found),
            "metrics": {MEAN: {"name": MEAN, "value": fmean(found)}},
        }
        for name, found in values.items()
    ]


def _scores(sample: Sample) -> dict[str, float]:
    right = {} if sample.correct is None else {"correct": float(sample.correct)}
    return {RETURN: sample.return_} | right | {f"reward/{name}": v for name, v in sample.rewards.items()}


def _entry(sample: Sample, *, epoch: int, model: str) -> dict[str, Any]:
    """Return one sample as an EvalSample."""
    messages = [{"role": ROLES[part.kind], "content": part.text} for part in sample.parts]
    answers = [message for message in messages if message["role"] == "assistant"]
    last = answers[-1] if answers else {"role": "assistant", "content": answer_of(sample)}
    explanation = facts(sample)
    entry: dict[str, Any] = {
        "id": sample.task,
        "epoch": epoch,
        "input": prompt_of(sample),
        "target": sample.target or "",
        "messages": messages,
        "output": {
            "model": model,
            "choices": [{"message": last, "stop_reason": "max_tokens" if "length" in sample.end else "stop"}],
        },
        "scores": {
            name: {"value": value, "answer": sample.answer, "explanation": explanation}
            for name, value in _scores(sample).items()
        },
        "metadata": {
            name: getattr(sample, name)
            for name in (
                "step", "policy_version", "env", "group", "chosen", "advantage", "version_min", "version_max", "lag",
                "end", "replayed", "temperature", "time",
            )
        },
    }  # fmt: skip
    if sample.failed:
        entry["error"] = {"message": sample.failure, "traceback": "", "traceback_ansi": ""}
        entry["scores"] = {}
    return entry
