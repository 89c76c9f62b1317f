"""Runs a role in a terminal: this process becomes the role, with the environment of a supervised role.

``python -m launch.by_hand RUN_FOLDER ARGUMENTS_OF_TORCHRUN`` is the entry point of the learner's ranks on one host.
torchrun ends with code 1 whatever its ranks ended with, and a rank that loses its connection does not know why. This
program is torchrun, and ends with the code of the error that ended the learner on any of its hosts.
"""

import os
import sys
from pathlib import Path

from launch import errors, run_folder
from launch.errors import ConfigError
from launch.preflight.hardware import decided_by_hand
from launch.processes import command_of_role, gpu_lock, ranks_of, role_environment
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
        errors.clear_note(folder, name or role)
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
    command = command_of_role(role, folder, *arguments, ranks=ranks)
    if "torch.distributed.run" in command:
        command[1:3] = ["-m", "launch.by_hand", str(folder)]
    env = role_environment(threads, local_model=config.local_models)
    if role in ("learner", "generator") and config.generator.sleep_in_updates is True:
        env |= gpu_lock(folder)
    os.execvpe(command[0], command, {**os.environ, **env})


ROLE = "learner"
"""Name under which all ranks leave their notes."""


def main() -> None:
    """Run torchrun. Exit with `errors.FINAL` if the learner ended with an error that another start would repeat."""
    from torch.distributed.run import main as torchrun

    folder = Path(sys.argv[1])
    try:
        torchrun(sys.argv[2:])
    except Exception:
        # The first host removes an earlier note before its ranks start, so this one is of the present learner.
        if errors.read_note(folder, ROLE) != errors.FINAL:
            raise
        sys.stderr.write(f"{ROLE}: it ended for good: {errors.read_reason(folder, ROLE)}\n")
        sys.exit(errors.FINAL)


if __name__ == "__main__":
    main()
