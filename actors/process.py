"""The actor process: from its settings to the end of the event loop in which `actors.actor.Actor` runs."""

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq

from actors.actor import Actor
from actors.config import ActorConfig
from actors.render import Renderer
from envs.base import Suite
from envs.config import EnvConfig
from envs.registry import make_suite

SWITCH_S = 0.001
"""Time after which a thread that computes in Python lets another one run. The default of 5 ms would let a few
computing environments delay the heartbeats."""


def run_actor(
    config: ActorConfig,
    *,
    name: str,
    broker: str,
    model: str,
    env: EnvConfig,
    run: str,
    keys: Path | None = None,
    template_args: Mapping[str, Any] | None = None,
    special_in_messages: bool = False,
    in_step: bool = False,
) -> None:
    """Run episodes until SIGTERM or a Drain message, then drain. Blocks until the actor has ended.

    Args:
        config: ``[actor]`` of the run file.
        name: peer name, unique in the run.
        broker: endpoint of the broker.
        model: folder with the model's tokenizer files. The actor reads no weights.
        env: ``[env]`` of the run file.
        run: name of the run. The actor ends if the broker serves a different one.
        keys: folder of the keys. None means that nothing is encrypted.
        template_args: further variables of the chat template, `[model] template_args` of the run file.
        special_in_messages: see `actors.render.Renderer`, `[model] special_tokens_in_messages` of the run file.
        in_step: run windows in lockstep, see `actors.episode.Bounds`.

    Raises:
        EnvError: the environment cannot be used.
        ActorError: the tokenizer cannot be used, or the broker refuses this actor or is lost.
        LinkDown: no broker answers.
    """
    # This handler works until the event loop installs its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sys.setswitchinterval(SWITCH_S)
    renderer = Renderer(Path(model), template_args, special_in_messages=special_in_messages)

    def make() -> Suite:
        return make_suite(env.name, env.params)

    asyncio.run(_serve(config, name, broker, env.name, run, make, renderer, keys, in_step))
    # The linger time lets the Goodbye leave.
    zmq.Context.instance().destroy(linger=1_000)


async def _serve(
    config: ActorConfig,
    name: str,
    broker: str,
    env_name: str,
    run: str,
    make: Callable[[], Suite],
    renderer: Renderer,
    keys: Path | None,
    in_step: bool,
) -> None:
    actor = Actor(config, name, broker, env_name, run, make, renderer, keys, in_step=in_step)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, actor.stop)
    await actor.run()
