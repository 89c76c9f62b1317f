"""The arguments of the command `offbeat`: every verb, its help, and the groups in which it is shown.

The arguments of the verbs stand here and not beside their code, so that the command line starts without slow libraries.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from launch.commands.hosts import add_drain, add_host, add_scale, add_ticket
from launch.commands.keys import add_keys
from launch.commands.launch import add_launch
from launch.completion import SHELLS

PLAN_TEXT = (
    "predict throughput, policy lag and idle shares for numbers of generators and actors, from measured rates, on a "
    "virtual clock; see docs/run/capacity.md"
)


def add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of `offbeat plan`."""
    plan = commands.add_parser("plan", help=PLAN_TEXT.partition(", from")[0], description=PLAN_TEXT)
    plan.add_argument("run_file", type=Path)
    plan.add_argument("overrides", nargs="*", metavar="section.field=value", help="of the run file")
    _add_plan_rates(plan)
    plan.add_argument("--generators", nargs="+", type=int, metavar="N", help="default: generator.count")
    plan.add_argument("--actors", nargs="+", type=int, metavar="N", help="default: actor.count")
    plan.add_argument(
        "--episodes", nargs="+", type=int, metavar="N", help="per actor; default: actor.concurrent_episodes"
    )
    plan.add_argument("--steps", type=int, default=60, help="learner steps to simulate; default: 60")
    plan.add_argument(
        "--own-cores",
        action="store_true",
        help="every process has cores, or a GPU, of its own: none slows another down",
    )
    plan.add_argument(
        "--join-every",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="generators and actors join one after the other, so far apart",
    )
    plan.add_argument("--json", action="store_true", help="for programs")


def _add_plan_rates(plan: argparse.ArgumentParser) -> None:
    """Add the arguments that say from where the rates come."""
    plan.add_argument(
        "--calibrate",
        type=float,
        metavar="SECONDS",
        help="first run the real system for so long, and write its rates; 30 is a good start",
    )
    plan.add_argument(
        "--rates",
        type=Path,
        metavar="FILE",
        help="rates to read, or to write with --calibrate; default: NAME-rates.toml in the folder of run folders",
    )
    plan.add_argument(
        "--rate",
        action="append",
        default=[],
        metavar="section.field=value",
        help="in place of the file's, for example learner.seconds_per_token=1e-5; may be given several times",
    )


LISTEN = "127.0.0.1:5760"


def add_envs(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", run_file: str, overrides: str
) -> None:
    """Add the arguments of `offbeat envs`.

    Args:
        run_file, overrides: help of these arguments.
    """
    text = 'serve the environment of a run file over HTTP, for run files with env.name = "remote"'
    command = commands.add_parser("envs", help=text, description=text)
    command.add_argument("run_file", type=Path, help=run_file)
    command.add_argument("overrides", nargs="*", metavar="section.field=value", help=overrides)
    command.add_argument(
        "--listen",
        default=LISTEN,
        metavar="HOST:PORT",
        help=f"default: {LISTEN}; port 0 takes a free one; other hosts than loopback need --keys",
    )
    command.add_argument("--keys", type=Path, metavar="FOLDER", help="keys folder with certificate and token")


JOURNAL_KINDS = ("snapshot", "event", "segment", "dead")
EXPORT_FORMATS = ("jsonl", "safetensors")
JOURNAL_TEXT = "look into the journal of a run: its files, records, damage; take trajectories out of it"


def add_journal(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of `offbeat journal`."""
    actions = commands.add_parser("journal", help=JOURNAL_TEXT, description=JOURNAL_TEXT).add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    texts = {
        "ls": "list the files: bytes, records by kind, first and last record, whether it is needed",
        "show": "print records, one per line, oldest first",
        "verify": "check every byte; exit code 1 if something is damaged or missing",
        "export": "write trajectories to a file",
        "accept-loss": "let the broker start again although something is damaged or missing, and go on without it",
    }
    parsers = {name: actions.add_parser(name, help=text, description=text) for name, text in texts.items()}
    for parser in parsers.values():
        parser.add_argument("run", type=Path, help="run folder")
    show, take = parsers["show"], parsers["export"]
    show.add_argument("--trajectory", help="only what concerns this one, its task or its group, by id")
    show.add_argument("--kind", choices=JOURNAL_KINDS, help="only these records")
    show.add_argument("--limit", type=int, help="only the newest so many of them")
    show.add_argument(
        "--dead", action="store_true", help="messages that could not be accepted, with their frames"
    )
    take.add_argument(
        "--trajectory", action="append", help="only this one, by id; may be given several times"
    )
    take.add_argument(
        "--format", choices=EXPORT_FORMATS, help=f"default: {EXPORT_FORMATS[0]}; not with --trained"
    )
    take.add_argument(
        "--trained",
        action="store_true",
        help="one line for each sampled token, with what the learner made of it; .jsonl or .parquet",
    )
    take.add_argument("--out", type=Path, required=True, help="file to write; whole or not at all")


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Parser that the commands are added to."""

GROUPS = {
    "every day": ("train", "check", "status", "view", "samples", "recipes"),
    "look into a run, or plan one": ("eval", "journal", "retrain", "plan"),
    "more hosts": ("ticket", "host", "scale", "drain", "launch"),
    "prepare, and hand on": ("model", "keys", "completion", "push"),
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
"""Commands that become a role. Their exit code says whether another start could help, see `launch.errors`."""
RUN_FILE = "TOML file, or a name that `offbeat recipes` lists, for example spell_backward"
OVERRIDES = "settings in place of the file's, for example learner.steps=20"
WITH_CODES = (*BY_HAND, "host", "train")
"""Commands whose exit code says whether another start could help, also if the command line refuses something."""
NO_RUN_FILE = (
    "recipes",
    "status",
    "view",
    "samples",
    "journal",
    "keys",
    "retrain",
    "push",
    "ticket",
    "host",
    "scale",
    "drain",
    "launch",
    "completion",
)
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
    add_recipes(commands)
    add_completion(commands)
    add_retrain(commands)
    add_push(commands)
    add_status(commands)
    add_view(commands)
    add_samples(commands)
    add_journal(commands)
    add_keys(commands)
    add_ticket(commands)
    add_host(commands)
    add_scale(commands)
    add_drain(commands)
    add_plan(commands)
    add_eval(commands)
    add_envs(commands, RUN_FILE, OVERRIDES)
    add_launch(commands, RUN_FILE, OVERRIDES)
    for name, text in COMMANDS.items():
        add_with_run_file(commands, name, text)
    texts = {action.dest: action.help or "" for action in commands._get_subactions()}
    main_parser.description = grouped(texts)
    return main_parser


def add_recipes(commands: Commands) -> None:
    """Add the arguments of `offbeat recipes`."""
    text = "list the shipped run files, or print one: needs, page, and all settings, merged"
    recipes = commands.add_parser("recipes", help=text, description=text)
    recipes.add_argument("name", nargs="?", help="print this one; the output is a run file, too")


def add_completion(commands: Commands) -> None:
    """Add the arguments of `offbeat completion`."""
    text = 'print a script that completes words in a shell: eval "$(offbeat completion bash)"'
    completion = commands.add_parser("completion", help=text.partition(":")[0], description=text)
    completion.add_argument("shell", choices=SHELLS)


def add_retrain(commands: Commands) -> None:
    """Add the arguments of `offbeat retrain`."""
    text = "train again what a run was trained on, from its journal; publishes nothing"
    retrain = commands.add_parser("retrain", help=text, description=text)
    retrain.add_argument("run", type=Path, help="run folder")
    retrain.add_argument("--steps", type=int, help="train only the first STEPS steps again; default: all")
    retrain.add_argument("--out", type=Path, help="folder for the model; default: RUN/retrained")
    retrain.add_argument(
        "--tokens", type=Path, metavar="FILE", help="write each trained token's numbers; .jsonl or .parquet"
    )


def add_push(commands: Commands) -> None:
    """Add the arguments of `offbeat push`."""
    text = "upload the model of a run, with its model card, to the hub of Hugging Face"
    push = commands.add_parser(
        "push", help=text, description=f"{text}; HF_TOKEN, or `hf auth login`, says who you are"
    )
    push.add_argument("run", type=Path, help="run folder")
    push.add_argument("repo", help="name of the repository, OWNER/NAME; it is made unless it is there")
    which = push.add_mutually_exclusive_group()
    which.add_argument(
        "--best", action="store_true", help="the model with the best evaluation; default: the last one"
    )
    which.add_argument("--step", type=int, help="the model that learner.export_every wrote after this step")
    push.add_argument("--adapter", action="store_true", help="only the adapters, for PEFT")
    push.add_argument(
        "--public", action="store_true", help="make the repository for everybody; default: private"
    )


def add_status(commands: Commands) -> None:
    """Add the arguments of `offbeat status`."""
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


def add_with_run_file(commands: Commands, name: str, text: str) -> None:
    """Add the arguments of a command of `COMMANDS`, which takes a run file and overrides."""
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument("run_file", type=Path, help=RUN_FILE)
    command.add_argument("overrides", nargs="*", metavar="section.field=value", help=OVERRIDES)
    if name in ("train", "learner"):
        command.add_argument(
            "--resume",
            action="store_true",
            help="go on from the newest checkpoint of this run; `offbeat train` also takes --resume=FOLDER",
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
            "--again",
            action="store_true",
            help="for scripts: resume in DIR/NAME, or start there, but in no other folder; wait while it is in use",
        )
        command.add_argument(
            "--changed",
            action="store_true",
            help="with --resume: accept another seed, environment, model, reward or family",
        )
        command.add_argument(
            "--in-process",
            action="store_true",
            help="run all roles in this process and one event loop, for a debugger: docs/extend/debugging.md",
        )
        command.add_argument(
            "--journal",
            choices=("disk", "memory"),
            default="disk",
            help="with --in-process: whether the broker keeps its journal in the run folder; default: disk",
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


VIEW_LISTEN = "127.0.0.1:6007"


def add_view(commands: Commands) -> None:
    """Add the arguments of `offbeat view`."""
    text = "show runs in a browser: progress, who waits for whom, what became of every token, what the model writes"
    view = commands.add_parser("view", help=text, description=text)
    view.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders; default: newest run")
    view.add_argument(
        "--listen",
        default=VIEW_LISTEN,
        metavar="HOST:PORT",
        help=f"default: {VIEW_LISTEN}; port 0 takes a free one; other hosts than loopback need --keys",
    )
    view.add_argument(
        "--keys", type=Path, metavar="FOLDER", help="keys folder of the run, with certificate and token"
    )
    view.add_argument(
        "--demo", action="store_true", help="show a small recorded run that is shipped with Offbeat"
    )
    view.add_argument(
        "--export", type=Path, metavar="FOLDER", help="write a copy that opens from the disk; serve nothing"
    )


def add_samples(commands: Commands) -> None:
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
    samples.add_argument("-n", type=int, metavar="COUNT", help="most samples shown; default: 5")
    form = samples.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="lines of JSON, for programs")
    form.add_argument(
        "--inspect",
        type=Path,
        metavar="FOLDER",
        help="write logs for Inspect View; all samples, unless -n says less",
    )
    form.add_argument(
        "--otlp", metavar="URL", help="send spans to an OTLP receiver; all samples, unless -n says less"
    )


def add_eval(commands: Commands) -> None:
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
