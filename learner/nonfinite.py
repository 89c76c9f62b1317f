"""Saves the trajectories of a step whose loss or gradient was not finite."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from learner.trajectory import Trajectory
from protocol.arrays import TOKEN_ARRAYS


def save_trajectories(folder: Path, step: int, trajectories: Sequence[Trajectory]) -> Path:
    """Write a step's trajectories, arrays to ``step-N.npz`` and the rest to ``step-N.json``.

    Returns:
        Path of the npz file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for i, t in enumerate(trajectories):
        for name in TOKEN_ARRAYS:
            arrays[f"{i}.{name}"] = getattr(t, name)
    path = folder / f"step-{step:06d}.npz"
    np.savez_compressed(path, **arrays)
    headers = [
        {"trajectory_id": t.trajectory_id, "group_id": t.group_id, "status": t.status, "return": t.return_}
        for t in trajectories
    ]
    path.with_suffix(".json").write_text(json.dumps(headers, indent=1), encoding="utf-8")
    return path
