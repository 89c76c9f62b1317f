"""A method by itself: the part of a method file that goes into any job, without the job that shows it."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.errors import ConfigError
from launch.run_file.shipped import METHODS, run_files

METHOD_SETTINGS = {
    "algorithm": "the objective, whole",
    "train_on": "what a batch is made of",
    "replay": "trajectories that are trained again",
    "family": "groups that ask for further groups",
    "reward": "how rewards become the values that are compared",
    "filter_uniform_groups": "whether groups that train nothing are left out, or counted",
    "group_size": "how many answers to one task the advantage needs",
    "max_policy_lag": "the staleness up to which the method was seen to keep its reward",
}
"""Settings of `[learner]` that belong to a method, each with what it is.

The rule: a setting belongs to the method if a job with other lengths, another model and another environment would
need it, too. Lengths, sizes, steps, the optimizer and the numbers of roles belong to the job.
"""
REPLACED = ("algorithm", "train_on", "replay", "family")
"""Settings that a method replaces as a whole, so that no half of a former method is left."""
DEMO = "demo"
"""Table of a method file with the settings of the job that shows the method."""


def of_method_file(path: Path, content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a file's content into its settings and those of its demo.

    A method file has the table `[recipe]`, and is named after its method. Other files have no demo.

    Example:
        >>> of_method_file(Path("bapo.toml"), {"recipe": {}, "learner": {"replay": {}}, "demo": {"actor": {}}})
        ({'method': 'bapo', 'recipe': {}, 'learner': {'replay': {}}}, {'actor': {}})
        >>> of_method_file(Path("job.toml"), {"learner": {"steps": 9}})
        ({'learner': {'steps': 9}}, {})
    """
    if "recipe" not in content:
        return dict(content), {}
    settings = {name: value for name, value in content.items() if name != DEMO}
    return {"method": path.stem, **settings}, dict(content.get(DEMO, {}))


def method_file(name: Any, source: Path) -> Path:
    """Return the file of a method: a shipped one by its name, or a file relative to ``source``.

    Args:
        name: value of `method` in the run file.
        source: run file that names the method.

    Raises:
        ConfigError: there is no such method; the text names the nearest one.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{source}: method is {name!r}; write the name of one method, as a string")
    methods = run_files(METHODS)
    if name in methods:
        return methods[name]
    file = source.parent / name
    if file.suffix == ".toml" and file.is_file():
        return file
    if name in run_files():
        cure = f'it is a job, not a method; write extends = "{name}"'
    elif near := difflib.get_close_matches(name, methods, n=1):
        cure = f"did you mean {near[0]!r}?"
    else:
        cure = f"there are: {', '.join(methods)}"
    raise ConfigError(f"{source}: method {name!r} is unknown; {cure}")


def method_settings(path: Path, content: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Return the settings that a method file brings into a job.

    Args:
        path: file of the method.
        content: the file's own content.
        source: run file that names the method.

    Raises:
        ConfigError: the file sets something that belongs to a job; `extends` takes such a file.
    """
    learner = content.get("learner", {})
    foreign = [name for name in content if name not in ("extends", "recipe", "learner", DEMO)]
    if isinstance(learner, Mapping):
        foreign += [f"learner.{name}" for name in learner if name not in METHOD_SETTINGS]
    if foreign or not isinstance(learner, Mapping):
        raise ConfigError(
            f"{source}: method {path.stem!r} ({path}) sets {', '.join(foreign) or 'learner'}, which belongs to a job; "
            f"a method sets only learner.{', learner.'.join(METHOD_SETTINGS)}. Move the rest to [{DEMO}], or write "
            f'extends = "{path.stem}" to take the whole job'
        )
    recipe = {name: content[name] for name in ("recipe",) if name in content}
    return {"method": path.stem, **recipe, "learner": dict(learner)}


def without_method(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the method that they have, as far as the next one replaces it.

    Example:
        >>> without_method({"method": "ppo", "learner": {"steps": 9, "train_on": "trajectories"}, "env": {}})
        {'learner': {'steps': 9}, 'env': {}}
        >>> without_method({"learner": {"reward": {"weights": {"short": 0.5}, "group": {"kind": "win_rate"}}}})
        {'learner': {'reward': {'weights': {'short': 0.5}}}}
    """
    kept = {name: value for name, value in settings.items() if name not in ("method", "recipe")}
    learner = kept.get("learner")
    if isinstance(learner, Mapping):
        kept["learner"] = {name: value for name, value in learner.items() if name not in REPLACED}
        if isinstance(reward := learner.get("reward"), Mapping):
            # Weights are of the environment's rewards, so they are the job's; the rest is the former method's.
            kept["learner"]["reward"] = {name: value for name, value in reward.items() if name == "weights"}
    return kept
