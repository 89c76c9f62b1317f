"""Finds what `--resume` goes on from: the run folder, and the settings that changed since the last start."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from launch.errors import ConfigError
from launch.run_file.sections import RunConfig
from learner.checkpoint_files import standing
from learner.errors import CheckpointError
from learner.run_files import CHECKPOINTS, RESULT

CONFIG = "config.json"
BY_HAND = "config-learner.json"
"""Settings of a learner that was started by hand."""
IDENTITY = ("run.seed", "env.", "model.", "learner.reward.", "learner.family")
"""Settings without which a run is a different experiment."""
WHOLE = ("env.params", "learner.reward.weights")
"""Tables whose keys are the user's, so that a key that only one side has is a difference, too."""
ELSEWHERE = ("model.cache", "run.dir")
"""Settings that say where something lies, and not what it is."""


class Change(NamedTuple):
    """A setting that differs from the last start of the run."""

    field: str
    before: Any
    now: Any

    def __str__(self) -> str:
        if self.field == "env.content":
            return "a file of the environment (rows, rewards, tools) has changed"
        return f"{self.field} is {json.dumps(self.now)}, it was {json.dumps(self.before)}"


def newest_begun(config: RunConfig) -> Path:
    """Return the newest folder of this run in which a learner has begun: ``dir/name`` or ``dir/name-N``.

    A folder whose run was *named* ``name-N`` belongs to a different run.

    Raises:
        ConfigError: there is none; the text lists folders that look alike.
    """
    base, own = config.run.dir / config.run.name, re.compile(re.escape(config.run.name) + r"(-\d+)?")
    alike = [p for p in config.run.dir.glob(f"{config.run.name}*") if own.fullmatch(p.name)]
    begun = [p for p in alike if (p / "epoch").exists()]
    old = [p for p in begun if run_name(p) == config.run.name]
    if not old:
        others = f" ({', '.join(f'{p.name} is of run {run_name(p)!r}' for p in begun)})" if begun else ""
        raise ConfigError(
            f"--resume: no learner has begun in a run folder {base}{others}; start without --resume"
        )
    return max(old, key=lambda p: p.stat().st_mtime)


def run_name(folder: Path) -> str:
    """Return the `run.name` that a run folder was made for; the folder's own name if no file says it."""
    saved = saved_settings(folder)
    return str(saved.get("run", {}).get("name", folder.name)) if saved else folder.name


def saved_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the last start of a run, as saved; empty if there are none that can be read."""
    for name in (CONFIG, BY_HAND):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            return content
    return {}


def changes(before: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> Iterator[Change]:
    """Yield the settings that differ. A setting that only one side has is left out, as a version may add it.

    A port that the run file leaves open is no difference.

    Example:
        >>> old = {"run": {"seed": 0}, "broker": {"http": "127.0.0.1:4711"}, "learner": {"steps": 9, "gone": 1}}
        >>> new = {"run": {"seed": 7}, "broker": {"http": "127.0.0.1:0"}, "learner": {"steps": 9, "new": 2}}
        >>> [str(change) for change in changes(old, new)]
        ['run.seed is 7, it was 0']
    """
    for name in now:
        if name not in before:
            continue
        old, new, field = before[name], now[name], f"{above}{name}"
        if isinstance(old, dict) and isinstance(new, dict) and not field.startswith(WHOLE):
            yield from changes(old, new, f"{field}.")
        elif old != new and not (isinstance(new, str) and new.endswith(":0")):
            yield Change(field, old, new)


def what_changed(config: RunConfig, folder: Path, *, accepted: bool) -> list[str]:
    """Return lines on the settings that changed since the last start of a run, and keep the former ones.

    The former settings are kept in ``config-until-step-N.json``.

    Args:
        accepted: the user has accepted a change of the seed, the environment, the model, the rewards or the families.

    Raises:
        ConfigError: such a change was not accepted; one line for each.
    """
    found = [
        change
        for change in changes(saved_settings(folder), json.loads(config.model_dump_json()))
        if change.field not in ELSEWHERE
    ]
    refused = [change for change in found if change.field.startswith(IDENTITY)]
    if refused and not accepted:
        raise ConfigError("\n".join(_refusal(change, folder) for change in refused))
    if not found:
        return []
    kept = _keep(folder)
    return [
        *(f"changed since the last start: {change}" for change in found),
        f"the former settings are in {kept}",
    ]


def nothing_left(config: RunConfig, folder: Path) -> str:
    """Return a sentence for a run that has done all its steps and is resumed with no more of them; else ""."""
    try:
        done = int(json.loads((folder / RESULT).read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, TypeError, LookupError):
        return ""
    if done < config.learner.steps:
        return ""
    return (
        f"all {config.learner.steps} steps are done, so nothing is left to train: the roles start for a last "
        "evaluation only; raise learner.steps to go on"
    )


def _refusal(change: Change, folder: Path) -> str:
    cure = "change it back, or accept a different experiment with --changed"
    return f"--resume: {change} when {folder} was begun; {cure}"


def _keep(folder: Path) -> Path:
    """Copy the former settings to a file that names the last step that was trained with them."""
    try:
        last = standing(folder / CHECKPOINTS)
    except CheckpointError:
        last = None
    base = f"config-until-step-{last.step if last else 0}"
    path, again = folder / f"{base}.json", 1
    while path.exists():
        again += 1
        path = folder / f"{base}-{again}.json"
    path.write_text(json.dumps(saved_settings(folder), indent=1), encoding="utf-8")
    return path
