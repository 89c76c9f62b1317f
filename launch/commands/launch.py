"""`offbeat launch`: write the files of an engine for a run, and hand them to the engine's own client."""

import argparse
import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launch.fleet.job import Job
    from launch.fleet.site import KubernetesSite

TEXT = "run a head and its hosts by an engine, from ssh to Kubernetes; without --render, hand the files to its client"


def add_launch(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", run_file: str, overrides: str
) -> None:
    """Add the arguments of `offbeat launch`.

    Args:
        run_file, overrides: help of these arguments.
    """
    command = commands.add_parser("launch", help=TEXT.partition(";")[0], description=TEXT)
    command.add_argument("run_file", nargs="?", type=Path, help=run_file)
    command.add_argument("overrides", nargs="*", metavar="section.field=value", help=overrides)
    command.add_argument("--on", choices=("ssh", "slurm", "systemd", "kubernetes", "ray"), help="the engine")
    command.add_argument(
        "--site", type=Path, metavar="FILE", help="TOML file that says where; docs/run/fleet.md"
    )
    command.add_argument(
        "--render", type=Path, metavar="FOLDER", help="write the files there, and start nothing"
    )
    command.add_argument("--dry-run", action="store_true", help="print the files, and start nothing")
    command.add_argument(
        "--wait",
        action="store_true",
        help="on Kubernetes: stay until the run is over, then end the pods of its hosts",
    )
    command.add_argument("--stop", type=Path, metavar="RUN", help="end what was launched for this run folder")


def run(args: argparse.Namespace) -> int:
    """Launch, render or stop. Return the exit code."""
    from launch.errors import ConfigError
    from launch.fleet import engines
    from launch.fleet.job import Job, launch_folder
    from launch.fleet.render import render
    from launch.fleet.site import read_site
    from launch.run_file.load import load

    if args.stop is not None:
        engines.stop(args.stop, say)
        return 0
    if args.run_file is None or args.on is None:
        raise ConfigError(
            "name a run file and an engine, as in `offbeat launch run.toml --on ssh`, or --stop RUN"
        )
    site = read_site(args.site)
    config = load(args.run_file, args.overrides)
    job = Job(str(args.run_file), tuple(args.overrides), config)
    if args.on == "kubernetes":
        job = with_what_pods_lack(job, args.run_file, site.kubernetes)
    files = render(job, site, args.on)
    if args.dry_run:
        for name, text in files.items():
            sys.stdout.write(f"# {name}\n{text}\n")
        return 0
    if args.render is not None or args.on == "systemd":
        folder = args.render or launch_folder(config)
        engines.write_files(files, folder)
        say(f"{folder}: {', '.join(files)}")
        if args.on == "systemd":
            say(units_next(folder, user=not site.systemd.user))
        return 0
    if args.on == "slurm":
        engines.submit(job, site, files, say)
        return 0
    if args.on == "kubernetes":
        from launch.fleet import kubectl

        launched = kubectl.apply(job, site.kubernetes, files, say)
        if args.wait:
            kubectl.release(launched, say)
        return 0
    if args.on == "ray":
        from launch.fleet.ray_hosts import hold_by_ray

        return hold_by_ray(job, site, files, say)
    if not site.ssh.hosts:
        raise ConfigError('--on ssh: the site file names no hosts; write hosts = ["gpu7"] under [ssh]')
    return engines.hold_by_ssh(job, site, files, say)


def with_what_pods_lack(job: "Job", run_file: Path, site: "KubernetesSite") -> "Job":
    """Return a job with the files that pods get in a ConfigMap, and with the sizes of their shared memory.

    Raises:
        ConfigError: pods would lack the model or a file, or the size of the model cannot be told from here.
    """
    from launch.errors import ConfigError
    from launch.fleet.kubectl import carried, refuse_local_model
    from launch.preflight.examine import model_files
    from launch.preflight.memory import model_size, shared_bytes

    refuse_local_model(job.config.model.path)
    size = None
    if job.config.model.path and not (site.shm and site.head_shm):
        with contextlib.suppress(ConfigError):
            folder = model_files(job.config)
            size = model_size(folder) if folder is not None else None
        if size is None:
            raise ConfigError(
                f"the size of {job.config.model.path} cannot be told from here, and the shared memory of pods follows "
                'from it; set kubernetes.shm and kubernetes.head_shm, for example to "64Gi"'
            )
    return replace(job, content=carried(run_file, site), shared=shared_bytes(job.config, size))


def units_next(folder: Path, *, user: bool) -> str:
    """Return what to do with units that were written.

    Example:
        >>> units_next(Path("units"), user=True)
        'next: `systemctl --user link units/*.service`, then start offbeat-head@NAME or offbeat-host@NAME'
    """
    systemctl = "systemctl --user" if user else "systemctl"
    return f"next: `{systemctl} link {folder}/*.service`, then start offbeat-head@NAME or offbeat-host@NAME"


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
