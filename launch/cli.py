"""The command `offbeat`."""

import argparse
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.commands.envs_arguments import add_envs
from launch.commands.journal_arguments import add_journal
from launch.commands.keys import add_keys
from launch.errors import LaunchError
from launch.exit_codes import exit_code
from launch.plan.arguments import add_plan
from launch.run_file.load import load
from launch.run_file.sections import RunConfig

SLOW_S = 5.0

if TYPE_CHECKING:
    from launch.preflight.examine import Examined

GROUPS = {
    "every day": ("train", "check", "status", "samples", "recipes"),
    "look into a run, or plan one": ("eval", "journal", "retrain", "plan"),
    "prepare": ("model", "keys"),
    "one role by hand, in this terminal": (
        "broker",
        "learner",
        "generator",
        "actor",
        "weights",
        "judge",
        "envs",
    ),
}
"""Commands in the order in which `offbeat --help` shows them."""
EPILOG = """
A run file is a TOML file, or a name that `offbeat recipes` lists. Behind it stand overrides of its settings:

  offbeat train spell_backward learner.steps=20 run.seed=1

Roles by hand need fixed ports, for example broker.endpoint=tcp://127.0.0.1:5755 broker.http=127.0.0.1:5756,
the same for all of them. `offbeat COMMAND --help` explains a command.
"""
COMMANDS = {
    "train": "start all roles on this machine, train, stop them, write a summary",
    "broker": "run the broker in this terminal",
    "learner": "run the learner in this terminal",
    "generator": "run one generator in this terminal",
    "actor": "run one actor in this terminal",
    "weights": "serve the learner's versions to other hosts, from its host, in this terminal",
    "judge": "run the model that gives rewards ([judge] in the run file) in this terminal",
    "check": "check a run file, its model and its environment; start nothing",
    "model": "make, download or convert the model of a run file, unless it is cached",
}

BY_HAND = ("broker", "learner", "generator", "actor", "weights", "judge")
"""Commands that become a role. Their exit code says whether another start could help, see `launch.exit_codes`."""
RUN_FILE = "TOML file, or a name that `offbeat recipes` lists, for example spell_backward"
OVERRIDES = "settings in place of the file's, for example learner.steps=20"

OLD_NAMES = {"replay": "retrain"}
"""Old names of verbs, which still work in this release, each with its new name."""
NO_RUN_FILE = ("recipes", "status", "samples", "journal", "keys", "retrain")
"""Commands that read no run file, and so take no overrides."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands' arguments."""
    main_parser = argparse.ArgumentParser(
        prog="offbeat",
        usage="offbeat COMMAND ...",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = main_parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS, prog="offbeat"
    )
    text = "list the shipped run files, or print one: needs, page, and all settings, merged"
    recipes = commands.add_parser("recipes", help=text, description=text)
    recipes.add_argument("name", nargs="?", help="print this one; the output is a run file, too")
    text = "train again what a run was trained on, from its journal; publishes nothing"
    retrain = commands.add_parser("retrain", help=text, description=text)
    retrain.add_argument("run", type=Path, help="run folder")
    retrain.add_argument("--steps", type=int, help="train only the first STEPS steps again; default: all")
    retrain.add_argument("--out", type=Path, help="folder for the model; default: RUN/retrained")
    text = "show a run: its processes, who waits for whom and for how long, queues, ledger, journal"
    status = commands.add_parser("status", help=text, description=text)
    status.add_argument(
        "target", nargs="?", default="", help="run folder, or address of the broker; default: newest run"
    )
    status.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    status.add_argument("--json", action="store_true", help="what the broker says, for programs")
    status.add_argument("-v", "--verbose", action="store_true", help="all numbers of queues and journal")
    status.add_argument(
        "--keys", type=Path, help="keys folder with the token, for a broker named by its address"
    )
    add_samples(commands)
    add_journal(commands)
    add_keys(commands)
    add_plan(commands)
    add_eval(commands)
    add_envs(commands, RUN_FILE, OVERRIDES)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("run_file", type=Path, help=RUN_FILE)
        command.add_argument("overrides", nargs="*", metavar="section.field=value", help=OVERRIDES)
        if name in ("train", "learner"):
            command.add_argument(
                "--resume", action="store_true", help="go on from the newest checkpoint of this run"
            )
            command.add_argument(
                "--from",
                type=int,
                dest="from_step",
                metavar="STEP",
                help="with --resume: go back to the checkpoint of this step; later ones are given up",
            )
        if name == "train":
            command.add_argument(
                "--changed",
                action="store_true",
                help="with --resume: accept another seed, environment, model, reward or family",
            )
        if name == "learner":
            command.add_argument(
                "--node",
                type=int,
                default=0,
                help="number of this host, if learner.nodes is above 1; default: 0",
            )
        if name in ("generator", "actor"):
            command.add_argument("--name", default=f"{name}-0", help="unique among all peers")
    texts = {action.dest: action.help or "" for action in commands._get_subactions()}
    main_parser.description = grouped(texts)
    return main_parser


def add_samples(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of `offbeat samples`."""
    text = "show what the model wrote: prompts, answers, rewards, advantages, versions"
    samples = commands.add_parser("samples", help=text, description=text)
    samples.add_argument("run", nargs="?", default="", help="run folder; default: newest run")
    which = samples.add_mutually_exclusive_group()
    for name, what in (
        ("worst", "lowest returns first"),
        ("best", "highest returns first"),
        ("failed", "episodes that failed, and why"),
    ):
        which.add_argument(f"--{name}", dest="only", action="store_const", const=name, default="", help=what)
    samples.add_argument("--heldout", action="store_true", help="only answers to held-out tasks")
    samples.add_argument("--step", type=int, help="only of this learner step, or of the evaluation after it")
    samples.add_argument("-n", type=int, default=5, metavar="COUNT", help="most samples shown; default: 5")
    samples.add_argument("--json", action="store_true", help="lines of JSON, for programs")


def add_eval(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of `offbeat eval`."""
    text = (
        "evaluate the newest weights of a run, or a model, on the held-out tasks of a run file; train nothing"
    )
    command = commands.add_parser("eval", help=text, description=text)
    command.add_argument("target", help="run folder, model folder, or the name of a model on the hub")
    command.add_argument("run_file", type=Path, help=RUN_FILE)
    command.add_argument("overrides", nargs="*", metavar="section.field=value", help=OVERRIDES)
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result for programs, too")


def grouped(texts: Mapping[str, str]) -> str:
    """Return the list of commands for `offbeat --help`, in the groups of `GROUPS`.

    Args:
        texts: what each command does, by its name.
    """
    lines = []
    for title, names in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<11}{texts[name]}" for name in names)]
    return "\n".join(lines).strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args, rest = parser().parse_known_args(_with_new_name(sys.argv[1:] if arguments is None else arguments))
    takes_overrides = args.command not in NO_RUN_FILE
    if unknown := [w for w in rest if not takes_overrides or w.startswith("-") or "=" not in w]:
        parser().error(f"unrecognized arguments: {' '.join(unknown)}")
    if getattr(args, "from_step", None) is not None and not args.resume:
        parser().error("--from STEP is for --resume")
    if args.command == "samples" and args.n < 1:
        parser().error("-n COUNT is at least 1")
    try:
        if args.command == "recipes":
            return show_recipes(args.name)
        if args.command == "status":
            from launch.commands.status import show

            return show(
                args.target, watch=args.watch, as_json=args.json, keys=args.keys, verbose=args.verbose
            )
        if args.command == "samples":
            from launch.commands import samples

            return samples.show(
                args.run,
                only=args.only,
                heldout=args.heldout,
                step=args.step,
                count=args.n,
                as_json=args.json,
            )
        if args.command == "journal":
            from launch.commands.journal import run

            return run(args)
        if args.command == "keys":
            from launch.commands import keys as keys_command

            return keys_command.run(args)
        if args.command == "retrain":
            from launch.commands.retrain import retrain

            retrain(args.run, steps=args.steps, out=args.out)
            return 0
        if args.command == "eval":
            from launch.commands.evaluate import evaluate

            return evaluate(args, [*args.overrides, *rest])
        if args.command == "envs":
            from launch.commands.envs import serve_envs

            return serve_envs(args, [*args.overrides, *rest])
        # Overrides may also stand behind options, where argparse does not recognise them.
        config = load(args.run_file, [*args.overrides, *rest])
        return execute(args, config)
    except LaunchError as error:
        sys.stderr.write(f"offbeat {args.command}: {error}\n")
        return exit_code(error) if args.command in BY_HAND else 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


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


def execute(args: argparse.Namespace, config: RunConfig) -> int:
    """Run one command that takes a run file. Return the exit code."""
    match args.command:
        case "check":
            tried = examined(config)
            for remark in [*tried.remarks, *([tried.memory] if tried.memory else [])]:
                sys.stdout.write(f"{args.run_file}: note: {remark}\n")
            method = f"method {config.method}, " if config.method else ""
            sys.stdout.write(f"{args.run_file}: ok (run {config.run.name}, {method}mode {config.run.mode})\n")
        case "train":
            from launch.supervise.supervisor import train
            from launch.supervise.terminal.panel import Panel

            tried = examined(config)
            with Panel() as panel:
                for remark in tried.remarks:
                    panel.note(remark)
                train(
                    tried.config,
                    resume=args.resume,
                    from_step=args.from_step,
                    changed=args.changed,
                    panel=panel,
                )
        case "plan":
            from launch.plan.command import plan

            return plan(args, config)
        case "model":
            from launch import logs
            from launch.model import prepare

            logs.configure("model")
            sys.stdout.write(f"{prepare(config)}\n")
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


def examined(config: RunConfig) -> "Examined":
    """Return the configuration to run, and remarks on what works but may not do what the settings say.

    Raises:
        ConfigError: the model, the environment, the run folder or the disk cannot be used.
    """
    from launch.preflight.examine import examine
    from launch.run_file.method_effect import notes

    with said_if_slow(
        "checking the model and the environment; a model that is not here yet is downloaded first"
    ):
        tried = examine(config)
    further = notes(config.learner, segment_tokens=config.actor.segment_tokens)
    return replace(tried, remarks=[*tried.remarks, *further])


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
