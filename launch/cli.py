"""The command `offbeat`."""

import argparse
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch import logs
from launch.arguments import NO_RUN_FILE, WITH_CODES, parser
from launch.errors import LaunchError, exit_code
from launch.run_file.load import load
from launch.run_file.sections import RunConfig

SLOW_S = 5.0

if TYPE_CHECKING:
    from launch.preflight.examine import Examined


LATE_OVERRIDES = ("host", "launch")
"""Commands of `NO_RUN_FILE` that take overrides all the same."""
OLD_NAMES = {"replay": "retrain"}
"""Old names of verbs, which still work in this release, each with its new name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args, rest = parsed(sys.argv[1:] if arguments is None else arguments)
    try:
        return run(args, rest)
    except LaunchError as error:
        sys.stderr.write(f"offbeat {args.command}: {error}\n")
        return exit_code(error) if args.command in WITH_CODES else 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments, and overrides behind options, where argparse does not recognise them.

    Ends the process with the usage and code 2 if the arguments are wrong.
    """
    # argparse would take the run file for the optional value of --resume.
    folders = [word.removeprefix("--resume=") for word in arguments if word.startswith("--resume=")]
    words = ["--resume" if word.startswith("--resume=") else word for word in arguments]
    args, rest = parser().parse_known_args(_with_new_name(words))
    if folders and args.command != "train":
        parser().error("--resume=FOLDER is for `offbeat train`")
    if folders:
        args.resume = Path(folders[-1])
    takes_overrides = args.command not in NO_RUN_FILE or args.command in LATE_OVERRIDES
    if unknown := [w for w in rest if not takes_overrides or w.startswith("-") or "=" not in w]:
        parser().error(f"unrecognized arguments: {' '.join(unknown)}")
    again = getattr(args, "again", False)
    if again and (args.resume or args.in_process):
        parser().error("--again finds out by itself whether to resume, and is for scripts of heads alone")
    if getattr(args, "from_step", None) is not None and not (args.resume or again):
        parser().error("--from STEP is for --resume")
    if getattr(args, "journal", "disk") == "memory" and not args.in_process:
        parser().error("--journal memory is for --in-process: other runs recover from the disk")
    if args.command in LATE_OVERRIDES:
        args.overrides = [*args.overrides, *rest]
    if args.command == "samples" and args.n is not None and args.n < 1:
        parser().error("-n COUNT is at least 1")
    return args, rest


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run one command. Return the exit code."""
    if args.command in NO_RUN_FILE:
        return run_without_file(args)
    overrides = [*args.overrides, *rest]
    match args.command:
        case "eval":
            from launch.commands.evaluate import evaluate

            return evaluate(args, overrides)
        case "envs":
            from launch.commands.envs import serve_envs

            return serve_envs(args, overrides)
        case _:
            # What a run file names may load libraries.
            with breakpoints_left_out(), logs.libraries_to_stderr():
                config = load(args.run_file, overrides)
            return execute(args, config)


def run_without_file(args: argparse.Namespace) -> int:
    """Run one command of `NO_RUN_FILE`. Return the exit code."""
    match args.command:
        case "recipes":
            return show_recipes(args.name)
        case "completion":
            from launch.completion import script
            from launch.run_file.recipes import recipes

            sys.stdout.write(script(parser(), args.shell, tuple(recipe.name for recipe in recipes())))
            return 0
        case "status":
            from launch.commands.status import show

            return show(
                args.target, watch=args.watch, as_json=args.json, keys=args.keys, verbose=args.verbose
            )
        case "view":
            from launch.commands.view import view

            return view(args)
        case "samples":
            return show_samples(args)
        case "push":
            from launch.commands.push import push

            return push(
                args.run, args.repo, best=args.best, step=args.step, adapter=args.adapter, public=args.public
            )
        case "journal":
            from launch.commands import journal

            return journal.run(args)
        case "keys":
            from launch.commands import keys

            return keys.run(args)
        case "ticket" | "host" | "scale" | "drain":
            from launch.commands import hosts

            return hosts.run(args)
        case "launch":
            from launch.commands import launch

            return launch.run(args)
        case _:
            from launch.commands.retrain import retrain

            retrain(args.run, steps=args.steps, out=args.out, tokens=args.tokens)
            return 0


def _with_new_name(arguments: Sequence[str]) -> list[str]:
    verb, *rest = [*arguments, ""]
    if verb not in OLD_NAMES:
        return list(arguments)
    new = OLD_NAMES[verb]
    sys.stderr.write(f"offbeat {verb} is called offbeat {new} now; the old name goes with the next release\n")
    return [new, *rest[:-1]]


def show_recipes(name: str | None) -> int:
    """Print the table of all recipes, or one recipe. Return the exit code."""
    from launch.run_file.recipes import find, page, recipes, table

    sys.stdout.write(page(find(name)) if name else table(recipes()))
    return 0


def show_samples(args: argparse.Namespace) -> int:
    """Print samples of what the model wrote. Return the exit code."""
    from launch.commands import samples

    return samples.show(
        args.run,
        only=args.only,
        heldout=args.heldout,
        step=args.step,
        count=args.n,
        as_json=args.json,
        inspect=args.inspect,
        otlp=args.otlp,
    )


def execute(args: argparse.Namespace, config: RunConfig) -> int:
    """Run one command that takes a run file. Return the exit code."""
    match args.command:
        case "check":
            show_check(args, config)
        case "train":
            if args.in_process:
                train_for_debugging(args, config)
            else:
                return train_here(args, config)
        case "plan":
            from launch.plan.command import plan

            return plan(args, config)
        case "model":
            from launch.model import prepare

            logs.configure("model")
            with logs.libraries_to_stderr():
                folder = prepare(config)
            sys.stdout.write(f"{folder}\n")
        case role:
            from launch.by_hand import run_by_hand

            run_by_hand(
                role,
                config,
                name=getattr(args, "name", ""),
                resume=getattr(args, "resume", False),
                from_step=getattr(args, "from_step", None),
                node=getattr(args, "node", 0),
            )
    return 0


def show_check(args: argparse.Namespace, config: RunConfig) -> None:
    """Try what a run file names, and print the remarks on it."""
    from launch.preflight.engine_trial import try_engine
    from launch.preflight.examine import model_files

    tried = examined(config)
    # A run finds this out when its generator starts, so only a check without a run tries it.
    with said_if_slow("trying whether vLLM can load the model"):
        unknown = try_engine(tried.config, model_files(tried.config))
    for remark in [*tried.remarks, *unknown, *tried.memory]:
        sys.stdout.write(f"{args.run_file}: note: {remark}\n")
    method = f"method {config.method}, " if config.method else ""
    sys.stdout.write(f"{args.run_file}: ok (run {config.run.name}, {method}mode {config.run.mode})\n")


def train_here(args: argparse.Namespace, config: RunConfig) -> int:
    """Try what a run file names, then train with all roles on this host. Return the exit code."""
    from launch.supervise.panel import Panel
    from launch.supervise.supervisor import code_of, train

    tried = examined(config)
    with Panel() as panel:
        for remark in tried.remarks:
            panel.note(remark)
        summary = train(
            tried.config,
            resume=args.resume,
            from_step=args.from_step,
            changed=args.changed,
            again=args.again,
            panel=panel,
            asked=config,
        )
    return code_of(summary)


def train_for_debugging(args: argparse.Namespace, config: RunConfig) -> None:
    """Try what a run file names, then train with all roles in this process."""
    from launch.in_process import alone, refuse, train_in_process
    from launch.supervise.summary import summary_rows

    refuse(config)
    config = alone(config)
    tried = examined(config)
    for remark in tried.remarks:
        sys.stderr.write(f"{remark}\n")
    summary = train_in_process(
        tried.config,
        resume=args.resume,
        from_step=args.from_step,
        changed=args.changed,
        journal=args.journal,
    )
    for name, value in summary_rows(summary):
        sys.stdout.write(f"{name:<22} {value}\n")


def examined(config: RunConfig) -> "Examined":
    """Return the configuration to run, and remarks on what works but may not do what the settings say.

    Raises:
        ConfigError: the model, the environment, the run folder or the disk cannot be used.
    """
    from launch.preflight.examine import examine
    from learner.settings.rules import notes

    slow = "checking the model and the environment; a model that is not here yet is downloaded first"
    with said_if_slow(slow), breakpoints_left_out():
        tried = examine(config)
    further = notes(config.learner, segment_tokens=config.actor.segment_tokens)
    return replace(tried, remarks=[*tried.remarks, *further])


@contextmanager
def breakpoints_left_out() -> Iterator[None]:
    """Leave out `breakpoint()` in the context: a trial of a reward or a formula is not the run."""
    before, sys.breakpointhook = sys.breakpointhook, lambda *_, **__: None
    # For the processes that try one, too.
    of_children = os.environ.get("PYTHONBREAKPOINT")
    os.environ["PYTHONBREAKPOINT"] = "0"
    try:
        yield
    finally:
        sys.breakpointhook = before
        del os.environ["PYTHONBREAKPOINT"]
        if of_children is not None:
            os.environ["PYTHONBREAKPOINT"] = of_children


@contextmanager
def said_if_slow(what: str, after_s: float = SLOW_S) -> Iterator[None]:
    """Write a line to stderr if the block takes longer than ``after_s``, so that nobody takes slow for hung."""
    timer = threading.Timer(after_s, lambda: sys.stderr.write(f"{what}\n"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


if __name__ == "__main__":
    sys.exit(main())
