"""`offbeat retrain RUN`: trains a learner again on the steps that the run's journal has recorded."""

import filecmp
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from launch import logs, run_folder
from launch.commands import recording
from launch.errors import ConfigError
from launch.processes.role_command import role_environment
from launch.resuming import BY_HAND
from launch.run_file.sections import RunConfig
from learner.recorded_steps import RecordedStep

DEFAULT_OUT = "retrained"


def retrain(run: Path, *, steps: int | None, out: Path | None) -> None:
    """Train again the first ``steps`` steps of a run, or all of them, and write the model to ``out``.

    Raises:
        ConfigError: there is no such run, ``out`` is not empty, or the steps cannot be trained again.
        RecordingError: the journal does not hold what was trained.
    """
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps {steps}: train at least one step again, or leave it out for all")
    config = configuration(run)
    out = out or run / DEFAULT_OUT
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} holds something already; name another folder with --out")
    env = role_environment(config.learner.threads_used, local_model=config.local_models)
    # Libraries read these variables when they are loaded, so this comes first.
    os.environ.update(env)
    logs.configure("retrain")
    recorded = recording.read(run / run_folder.JOURNAL)
    last = recorded.last if steps is None else min(steps, recorded.last)
    if not last:
        raise ConfigError(f"{run}: its journal holds no trained step; there is nothing to train again")
    train(config, recorded.steps(last), out)
    sys.stdout.write(f"trained {last} of {recorded.last} steps again, the model is in {out}\n")
    if last == recorded.last and (run / "model").is_dir():
        same = (
            "equal to those of the run, bit for bit"
            if same_weights(run / "model", out)
            else "other than the run's"
        )
        sys.stdout.write(f"its weights are {same}\n")


def train(config: RunConfig, steps: Iterable[RecordedStep], out: Path) -> None:
    """Run the learner on recorded steps and write the model to ``out``.

    Raises:
        ConfigError: the steps cannot be trained again.
    """
    from launch.model import prepare
    from learner.errors import CannotRetrain
    from learner.retrain import retrain as train_recorded

    settings = config.learner.model_copy(update={"max_policy_lag": config.max_policy_lag})
    try:
        train_recorded(
            settings,
            model=str(prepare(config)),
            seed=config.run.seed,
            steps=steps,
            out=out,
            segment_tokens=config.actor.segment_tokens,
        )
    except CannotRetrain as error:
        raise ConfigError(str(error)) from None


def configuration(run: Path) -> RunConfig:
    """Return the configuration with which a run was started.

    Raises:
        ConfigError: the folder is no run folder.
    """
    for name in (run_folder.CONFIG, BY_HAND):
        if (run / name).exists():
            config = run_folder.load_config(run / name)
            # A run of an earlier version had no shared rows. Its weights come out bit for bit without them only.
            shared = config.learner.share_prefixes and "share_prefixes" in config.learner.model_fields_set
            # The GPUs of the run need not be those of this host.
            own = {"share_prefixes": shared, "devices": ()}
            return config.model_copy(update={"learner": config.learner.model_copy(update=own)})
    raise ConfigError(f"{run} is no run folder: it has no {run_folder.CONFIG}")


def same_weights(one: Path, other: Path) -> bool:
    """Return whether two model folders hold the same tensor files, byte for byte."""
    names = sorted(path.name for path in one.glob("*.safetensors"))
    if names != sorted(path.name for path in other.glob("*.safetensors")):
        return False
    return bool(names) and not any(filecmp.cmpfiles(one, other, names, shallow=False)[1:])
