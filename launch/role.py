"""Entry point of one role process: ``python -m launch.role ROLE RUN_FOLDER [--name NAME] [--resume]``.

Each branch imports only its own role, so that a broker never loads torch.
"""

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from actors.errors import Orphaned
from broker.core.fleet import Limits
from broker.errors import BindRefused
from launch import logs, run_folder
from launch.errors import DONE, FAILED, ConfigError, LaunchError, exit_code, leave_note
from launch.run_file.sections import RunConfig
from launch.run_folder import http_keys, prepare_keys
from learner.errors import NothingToLearn
from protocol.errors import GpuUnusable, KeysUnusable, LinkDown, NotAdmitted
from protocol.processes import die_with_parent, supervised
from protocol.security.keys import key_pair, principal
from protocol.sockets import BlockingLink, ThreadLink

ROLES = ("broker", "learner", "generator", "actor", "weights", "judge", "model")

SIGNAL_SKEW_S = 5.0
"""Time by which the actors of a host may get their signal to end later than its generators."""
GOODBYE_S = 10.0
"""Time that a drained generator may take to end its last requests and updates, and to say Goodbye."""


def run(
    role: str,
    config: RunConfig,
    folder: Path,
    *,
    name: str = "",
    resume: bool = False,
    from_step: int | None = None,
    run_name: str = "",
    env_name: str = "",
) -> bool:
    """Run one role until it ends. Return whether it ended because the run is over.

    Args:
        run_name: name of the run as its broker has it; "": the name of ``folder``.
        env_name: environment that tasks name, if its file lies elsewhere on this host; "": the same name.
    """
    logs.configure(name or role)
    keys = None if role == "model" else prepare_keys(config, folder, role)
    if keys is not None and role in ("learner", "generator", "actor"):
        # Fail on missing keys now, before time is spent on making a model.
        key_pair(keys, principal(role).role, name or role)
    match role:
        case "broker":
            return broker(config, folder, keys)
        case "model":
            model(config)
        case "learner":
            learner(config, folder, keys, resume=resume, from_step=from_step)
        case "generator":
            return generator(config, run_name or folder.name, keys, name=name or "generator-0")
        case "weights":
            from launch.servers import serve_weights

            return serve_weights(config, folder, keys)
        case "judge":
            from launch.servers import serve_judge

            serve_judge(config, keys, _model)
        case "actor":
            return actor(config, run_name or folder.name, keys, name=name or "actor-0", env_name=env_name)
    return False


def broker_limits(config: RunConfig) -> Limits:
    """Return how long the broker waits for peers. Generators take longest to end, and say Goodbye after that."""
    grace_s = config.actor.drain_timeout_s + SIGNAL_SKEW_S
    fleet = config.fleet
    return Limits(orphan_s=fleet.orphan_s, over_s=grace_s + GOODBYE_S, bounds=fleet.bounds)


def broker(config: RunConfig, folder: Path, keys: Path | None) -> bool:
    from broker.service import serve

    return serve(
        config.broker,
        run=folder.name,
        max_policy_lag=config.max_policy_lag,
        journal=folder / run_folder.JOURNAL,
        keys=keys,
        http_keys=http_keys(config, keys),
        limits=broker_limits(config),
        digest=supervised(os.environ).digest,
    )


def model(config: RunConfig) -> None:
    from launch.model import with_teacher
    from launch.preflight.examine import preflight

    with_teacher(config)
    found, log = _model(config), logging.getLogger(__name__)
    if config.model.path:
        log.info("found: %s", found)
        return
    # The tokenizer of a tiny model exists only now.
    remarks = preflight(config)
    for remark in remarks:
        log.warning("%s", remark)
    if remarks:
        # `offbeat train` shows the last line.
        log.info("it is there: %s", found)


def learner(
    config: RunConfig,
    folder: Path,
    keys: Path | None,
    *,
    resume: bool,
    from_step: int | None = None,
    connect: Callable[..., BlockingLink] = ThreadLink,
) -> None:
    from launch.conversations import given_of
    from launch.model import with_teacher
    from launch.model_card import describe
    from launch.servers import weights_url
    from learner.evaluations import run_evaluation
    from learner.main import run_learner
    from learner.trackers.sink import TrackedRun, shown_config

    if not config.learner.steps:
        run_evaluation(
            config.learner,
            broker=config.broker.endpoint,
            model=_model(config),
            env_name=config.env.name,
            run=folder.name,
            run_dir=folder,
            seed=config.run.seed,
            keys=keys,
            weights_url=weights_url(config, keys),
            no_capacity_s=config.no_capacity_s,
        )
        return
    model = _model(config)
    run_learner(
        with_teacher(config).model_copy(update={"max_policy_lag": config.max_policy_lag}),
        broker=config.broker.endpoint,
        model=model,
        env_name=config.env.name,
        run=folder.name,
        run_dir=folder,
        seed=config.run.seed,
        mode=config.run.mode,
        max_minutes=config.run.max_minutes,
        resume=resume,
        segment_tokens=config.actor.segment_tokens,
        from_step=from_step,
        keys=keys,
        weights_url=weights_url(config, keys),
        trackers=config.run.trackers,
        tracked=TrackedRun(
            folder.name, folder, config.run.project, shown_config(config.model_dump(mode="json"))
        ),
        no_capacity_s=config.no_capacity_s,
        given=lambda: given_of(config, model),
        describe=partial(describe, config, folder.name),
        evaluates_beside=config.generator.evaluators > 0 and config.run.mode == "async",
        # The float type of a server run by others is not known here.
        connect=connect,
        generator_dtype="bfloat16" if config.generator.backend == "http" else config.generator.dtype_used,
    )


def generator(config: RunConfig, run_name: str, keys: Path | None, *, name: str) -> bool:
    from actors.generator.generator import serve_generator

    return serve_generator(
        config.generator,
        name=name,
        broker=config.broker.endpoint,
        model=_model(config),
        run=run_name,
        seed=config.run.seed,
        keys=keys,
        grace_s=config.actor.drain_timeout_s + SIGNAL_SKEW_S,
        orphan_s=config.fleet.orphan_s,
    )


def actor(config: RunConfig, run_name: str, keys: Path | None, *, name: str, env_name: str = "") -> bool:
    from actors.actor import run_actor
    from envs.registry import content_hash
    from launch.servers import actor_environment

    env = config.env
    os.environ.update(actor_environment(config.judge, keys))
    if env.content and content_hash(env.name, env.params) != env.content:
        raise ConfigError(
            "env: a file of the environment has changed since the run was started, and other actors have read it as it "
            "was; put it back, or stop the run and go on with --resume --changed"
        )
    return run_actor(
        config.actor,
        name=name,
        broker=config.broker.endpoint,
        model=_model(config),
        env=config.env,
        run=run_name,
        keys=keys,
        template_args=config.model.template_args,
        special_in_messages=config.model.special_tokens_in_messages,
        in_step=config.windows_in_step,
        env_name=env_name,
        orphan_s=config.fleet.orphan_s,
    )


def _model(config: RunConfig) -> str:
    from launch.model import prepare

    return str(prepare(config))


def main() -> None:
    """Run the role that the arguments of the supervisor (or torchrun) name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--from", type=int, dest="from_step", help="learner step to go back to")
    parser.add_argument("--minutes", type=float, help="left of the run's time limit, for a learner")
    parser.add_argument("--config", default=run_folder.CONFIG, help="file in the run folder")
    parser.add_argument("--run", default="", help="name of the run, if it is not that of the folder")
    parser.add_argument(
        "--env", default="", help="environment that tasks name, if it has a different one here"
    )
    args = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A learner rank's parent is torchrun, not the supervisor, so each rank asks to die with torchrun.
        die_with_parent()
    # Before it kills a process that hangs, the supervisor asks it where its threads stand.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    config = run_folder.load_config(args.folder / args.config)
    if args.minutes is not None:
        limited = config.run.model_copy(update={"max_minutes": args.minutes})
        config = config.model_copy(update={"run": limited})
    try:
        over = run(
            args.role,
            config,
            args.folder,
            name=args.name,
            resume=args.resume,
            from_step=args.from_step,
            run_name=args.run,
            env_name=args.env,
        )
    except Exception as error:
        exit_with_code(error, args.folder, args.name or args.role, own_keys=not config.security.keys)
    if over:
        with contextlib.suppress(OSError):
            leave_note(args.folder, args.name or args.role, DONE, "the run is over")


def exit_with_code(error: Exception, folder: Path, name: str, *, own_keys: bool = False) -> NoReturn:
    """Exit with a code that says whether another start could help. Log a traceback if it may be needed.

    Args:
        own_keys: whether the next start makes keys anew that are missing in the run folder.
    """
    remade = own_keys and isinstance(error, NotAdmitted) and error.code == "wrong_key"
    code = FAILED if remade else exit_code(error)
    known = isinstance(
        error, LaunchError | LinkDown | KeysUnusable | GpuUnusable | BindRefused | NothingToLearn | Orphaned
    )
    with contextlib.suppress(OSError):
        leave_note(folder, name, code, str(error) if known else f"{type(error).__name__}: {error}")
    if known:
        sys.stderr.write(f"{name}: {error}\n")
    else:
        logging.getLogger(__name__).critical("%s ends: %s", name, error, exc_info=error)
    sys.exit(code)


if __name__ == "__main__":
    main()
