"""Runs a role in a terminal: this process becomes the role, with the environment of a supervised role."""

import os

from launch import exit_codes, run_folder
from launch.errors import ConfigError
from launch.preflight.decided import decided_by_hand
from launch.processes.role_command import gpu_lock, ranks_of, role_command, role_environment
from launch.run_file.sections import RunConfig
from learner.run_files import METRICS


def run_by_hand(
    role: str,
    config: RunConfig,
    *,
    name: str,
    resume: bool,
    from_step: int | None = None,
    node: int = 0,
) -> None:
    """Replace this process by the role. Threads are pinned before any library is loaded.

    Args:
        node: number of this host among those of the learner; from 1 on its ranks follow those of the first.

    Raises:
        ConfigError: the run folder holds another run, the run file leaves a port open, there is no checkpoint
            of ``from_step``, the learner has no such host, or a GPU cannot be used.
        NotThereYet: the first host of the learner has not made the run folder.
    """
    if not 0 <= node < config.learner.nodes:
        raise ConfigError(
            f"--node {node}: learner.nodes is {config.learner.nodes}, so its hosts are 0 to {config.learner.nodes - 1}"
        )
    config = decided_by_hand(role, config)
    folder = run_folder.of_first_host(config) if node else run_folder.join(config)
    if not node:
        exit_codes.clear_note(folder, name or role)
    if role == "learner" and not (resume or node) and (folder / METRICS).exists():
        raise ConfigError(f"{folder} holds a run already; go on with --resume, or choose another run.name")
    saved = f"config-{name or role}{f'-node-{node}' if node else ''}.json"
    run_folder.save_config(config, folder / saved)
    judge_threads = config.judge.threads if config.judge else 1
    own = {
        "learner": config.learner.threads_used,
        "generator": config.generator.threads_used,
        "judge": judge_threads,
    }
    threads = own.get(role, 1)
    arguments = ["--config", saved, *(["--name", name] if name else []), *(["--resume"] if resume else [])]
    if from_step is not None:
        run_folder.check_step(folder, from_step)
        arguments += ["--from", str(from_step)]
    ranks = ranks_of(config.learner, node) if role == "learner" else None
    command = role_command(role, folder, *arguments, ranks=ranks)
    if "torch.distributed.run" in command:
        command[1:3] = ["-m", "launch.ranks", str(folder)]
    env = role_environment(threads, local_model=config.local_models)
    if role in ("learner", "generator") and config.generator.sleep_in_updates is True:
        env |= gpu_lock(folder)
    os.execvpe(command[0], command, {**os.environ, **env})
