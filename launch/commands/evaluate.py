"""`offbeat eval RUN|MODEL RUN_FILE`: evaluates a run's newest weights, or a model folder, without training."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from launch import run_folder
from launch.commands.retrain import configuration
from launch.errors import ConfigError, RoleFailed
from launch.model import prepare
from launch.preflight.examine import examine
from launch.run_file.load import load
from launch.run_file.sections import ModelSection, RunConfig
from launch.run_folder import saved_settings
from launch.supervise import shared_memory
from launch.supervise.crew import Crew
from launch.supervise.panel import Panel
from launch.supervise.summary import unanswered_text
from launch.supervise.supervisor import Interrupt, end, prepare_model, supervise
from learner.checkpoint_files import standing
from learner.errors import CheckpointError
from learner.run_files import CHECKPOINTS, RESULT

SCHEMA = 1
FROM_THE_FILE = (
    "sampling",
    "evaluation_tasks",
    "evaluation",
    "reward",
    "start_timeout_s",
    "data_timeout_s",
    "max_failed_episodes",
)
"""Settings of `[learner]` that the run file decides where the weights are a checkpoint of another run."""


class Weights(NamedTuple):
    """Weights to evaluate, and the settings to do it with."""

    words: str
    """Where the weights come from, for people."""
    config: RunConfig
    """Settings of the evaluation."""
    step: int
    """Learner steps that the weights were trained for in their run; 0 for a model."""
    checkpoints: Path | None = None
    """Folder of the checkpoints, of which the newest is evaluated; None: the model of the settings is."""


def evaluate(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `offbeat eval`. Return the exit code: 1 if a set has no result."""
    weights = find_weights(args.target, load(args.run_file, overrides))
    if args.json is not None and not args.json.parent.is_dir():
        raise ConfigError(f"--json {args.json}: there is no folder {args.json.parent}; make it first")
    tried = examine(weights.config)
    if not tried.config.learner.evaluation_sets:
        raise ConfigError("the environment has no held-out tasks, so there is nothing to evaluate")
    weights = weights._replace(config=tried.config)
    with Panel() as panel:
        for remark in tried.remarks:
            panel.note(remark)
        panel.note(f"evaluating {weights.words}")
        result = run(weights, panel)
    sys.stdout.write("\n".join(["", f"evaluation of {weights.words}", *lines_of(result)]) + "\n")
    if args.json is not None:
        content = {"schema": SCHEMA, "target": args.target, "weights": weights.words, **result}
        args.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    wanted = len(weights.config.learner.evaluation_sets)
    whole = [e for e in result["evaluations"] if e["return_mean"] is not None]
    return 0 if len(whole) == wanted else 1


def find_weights(target: str, config: RunConfig) -> Weights:
    """Return the weights that ``target`` names: those of a run folder, of a model folder or of a model on the hub.

    Args:
        target: a run folder, or a model as in `model.path`.
        config: settings of the run file.

    Raises:
        ConfigError: the run has no weights yet, or the run file asks for no evaluation.
    """
    config = for_evaluating(config)
    folder = Path(target)
    if "learner" not in saved_settings(folder):
        model = config.model.model_copy(update={"path": target})
        return Weights(f"the model {target}", _with_model(config, model), step=0)
    theirs = configuration(folder)
    steps = _steps_of_the_end(folder)
    if steps is not None:
        model = theirs.model.model_copy(update={"path": str(folder / "model")})
        return Weights(f"{folder} after its last step, {steps}", _with_model(config, model), steps)
    try:
        newest = standing(folder / CHECKPOINTS)
    except CheckpointError as error:
        raise ConfigError(f"{folder}: {error}") from None
    if newest is None:
        raise ConfigError(f"{folder} has neither a model nor a checkpoint yet; evaluate it later")
    # The folder of a tiny model is found by the settings of its own run.
    model = theirs.model
    if not model.path:
        model = model.model_copy(update={"path": str(prepare(theirs))})
    # A checkpoint of several hosts is read on this one.
    ours = {name: getattr(config.learner, name) for name in (*FROM_THE_FILE, "steps", "nodes", "rendezvous")}
    if (lora := theirs.learner.lora) is not None:
        ours["lora"] = lora.model_copy(update={"publish": "merged"})
    config = _with_model(config, model).model_copy(update={"learner": theirs.learner.model_copy(update=ours)})
    words = f"the checkpoint of step {newest.step} of {folder}"
    return Weights(words, config, newest.step, folder / CHECKPOINTS)


def for_evaluating(config: RunConfig) -> RunConfig:
    """Return the settings of a run that evaluates and does not train.

    Raises:
        ConfigError: there is nothing to evaluate.
    """
    if not config.learner.evaluation_sets:
        raise ConfigError("learner.evaluation_tasks is 0, and there is no [learner.evaluation.NAME]; add one")
    # Ranks are for the weights of a checkpoint only, which says how many it needs.
    learner = config.learner.model_copy(
        update={"steps": 0, "processes": 1, "nodes": 1, "rendezvous": "", "devices": ()}
    )
    section = config.run.model_copy(update={"name": f"{config.run.name}-eval", "mode": "async"})
    # What is evaluated is a whole model.
    generator = config.generator.model_copy(update={"adapter_rank": 0})
    return config.model_copy(update={"learner": learner, "run": section, "generator": generator})


def _with_model(config: RunConfig, model: ModelSection) -> RunConfig:
    return config.model_copy(update={"model": model})


def _steps_of_the_end(folder: Path) -> int | None:
    """Return the steps of a run that has ended and left its model; None if it has not."""
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return int(result["steps"]) if (folder / "model" / "config.json").is_file() else None


def run(weights: Weights, panel: Panel) -> dict[str, Any]:
    """Start all roles, evaluate, stop them, and return the learner's result.

    Raises:
        ConfigError: the run folder cannot be made.
        RoleFailed: a process that the evaluation needs has ended.
        KeyboardInterrupt: interrupted before the roles were started, or twice.
    """
    interrupt = Interrupt()
    folder = run_folder.create(weights.config, resume=False, note=panel.note)
    with contextlib.ExitStack() as held:
        held.enter_context(run_folder.claim(folder))
        held.enter_context(shared_memory.hold_folder(folder))
        config = run_folder.with_ports(weights.config)
        run_folder.save_config(config, folder / run_folder.CONFIG)
        if weights.checkpoints is not None:
            (folder / CHECKPOINTS).symlink_to(weights.checkpoints.resolve())
        panel.note(f"run folder {folder}")
        prepare_model(config, folder, panel, interrupt)
        crew = Crew(config, folder, note=panel.note)
        try:
            supervise(crew, config, folder, panel, interrupt, resume=False)
        finally:
            end(crew, interrupt, panel.note)
            panel.close()
        if interrupt.again:
            raise KeyboardInterrupt
    result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    # The learner of a model folder does not know how long the model was trained.
    result["steps"] = weights.step
    result["evaluations"] = [found | {"step": weights.step} for found in result["evaluations"]]
    if not result["evaluations"]:
        raise RoleFailed(f"nothing was evaluated: {interrupt.word or result['ended_by']}")
    return result


def lines_of(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for the terminal.

    Example:
        >>> found = {"set": "hard", "tasks": 8, "samples": 4, "answered": 30, "failed": 2, "not_run": 0, "why": "late"}
        >>> found |= {"pass_at": {"1": [0.5, 0.3, 0.7]}, "return_mean": 0.75, "rewards": {"score": 0.75}}
        >>> print("\\n".join(lines_of({"evaluations": [found]})))
        hard: 8 tasks, 4 answers each; 30 of 32 answered, 2 failed: late
          pass@1 0.500 (0.300 to 0.700)
          return 0.750 (score 0.750)
    """
    for found in result["evaluations"]:
        each = f"{found['samples']} answer{'s' if found['samples'] > 1 else ''} each"
        each = each if found["set"] else "1 greedy answer each"
        yield f"{found['set'] or 'held-out'}: {found['tasks']} tasks, {each}; {unanswered_text(found)}"
        if found["return_mean"] is None:
            yield "  no result: too many answers failed or were never run"
            continue
        for k, (value, low, high) in found["pass_at"].items():
            word = "accuracy" if not found["set"] else f"pass@{k}"
            yield f"  {word} {value:.3f} ({low:.3f} to {high:.3f})"
        names = ", ".join(f"{name} {mean:.3f}" for name, mean in found["rewards"].items())
        yield f"  return {found['return_mean']:.3f} ({names})"
