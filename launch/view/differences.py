"""What differs between runs: settings, results with intervals, and answers to the same held-out task. Pure."""

from collections.abc import Sequence
from typing import Any

from launch.view.columns import evaluation_of, reward_of
from launch.view.journal_index import JournalIndex
from launch.view.overview import evaluations, sentence
from launch.view.run_reader import RunFiles, flat_settings
from launch.view.table import finite

IGNORED = ("run.name", "run.dir", "broker.endpoint", "broker.http", "weights.http", "model.cache")
"""Settings that differ between any two runs, and change nothing."""
MAX_TASKS = 200


def differences_page(runs: Sequence[RunFiles], indexes: Sequence[JournalIndex]) -> dict[str, Any]:
    """Return the settings and results that differ between runs."""
    settings = [flat_settings(run.config_text) for run in runs]
    names = sorted({name for flat in settings for name in flat})
    rows = []
    for name in names:
        values = [flat.get(name) for flat in settings]
        if name not in IGNORED and len(set(values)) > 1:
            rows.append({"setting": name, "values": values})
    return {
        "runs": [run.name for run in runs],
        "sentences": [sentence(run) for run in runs],
        "settings": rows,
        "results": [evaluations(run.evaluations) for run in runs],
        "tasks": common_tasks(indexes),
        "packages": [run.supervisor.get("packages") for run in runs],
    }


def common_tasks(indexes: Sequence[JournalIndex]) -> list[int]:
    """Return the numbers of held-out tasks that all runs have answered."""
    found = [
        {one[1] for row in index.rows if row.purpose == "eval" and (one := evaluation_of(row)) is not None}
        for index in indexes
    ]
    return sorted(set.intersection(*found))[:MAX_TASKS] if found else []


def answers(index: JournalIndex, files: RunFiles, task: int) -> list[dict[str, Any]]:
    """Return the trajectories that answer a held-out task, in the order of the evaluations."""
    return [
        {
            "trajectory": row.trajectory,
            "evaluation": one[0],
            "reward": finite(reward_of(row, files.config)),
            "correct": row.correct,
            "length": row.action_tokens,
            "versions": row.versions,
        }
        for row in index.rows
        if row.purpose == "eval" and (one := evaluation_of(row)) is not None and one[1] == task
    ]
