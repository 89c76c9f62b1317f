"""Runs a role in a terminal: this process becomes the role, with the environment of a supervised role."""

import os

from launch import run_folder
from launch.errors import ConfigError
from launch.preflight.decided import decided_by_hand
from launch.processes import role_command, role_environment
from launch.run_file.sections import RunConfig


def run_by_hand(
    role: str, config: RunConfig, *, name: str, resume: bool, from_step: int | None = None
) -> None:
    """Replace this process by the role. Threads are pinned before any library is loaded.

    Raises:
        ConfigError: the run folder holds another run, the run file leaves a port open, there is no checkpoint
            of ``from_step``, or a GPU cannot be used.
    """
    config = decided_by_hand(role, config)
    folder = run_folder.join(config)
    if role == "learner" and not resume and (folder / "metrics.jsonl").exists():
        raise ConfigError(f"{folder} holds a run already; go on with --resume, or choose another run.name")
    saved = f"config-{name or role}.json"
    run_folder.save_config(config, folder / saved)
    judge_threads = config.judge.threads if config.judge else 1
    own = {"learner": config.learner.threads, "generator": config.generator.threads, "judge": judge_threads}
    threads = own.get(role, 1)
    arguments = ["--config", saved, *(["--name", name] if name else []), *(["--resume"] if resume else [])]
    if from_step is not None:
        run_folder.check_step(folder, from_step)
        arguments += ["--from", str(from_step)]
    processes = config.learner.processes if role == "learner" else 1
    command = role_command(role, folder, *arguments, processes=processes)
    env = role_environment(threads, local_model=config.local_models)
    os.execvpe(command[0], command, {**os.environ, **env})
