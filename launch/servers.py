"""The processes that serve a run beside its four roles: the weights server, and the vLLM server of its own judge."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path

from envs.rows.judge import OWN_KEY, OWN_MODEL, OWN_URL
from launch.errors import FINAL, ConfigError, read_note
from launch.run_file.sections import JudgeSection, RunConfig
from learner.run_files import RESULT, SHARED_MEMORY, says_over, weights_folder
from protocol.security.addresses import split_address
from protocol.security.http import read_tokens
from protocol.weights.format import version_folder
from protocol.weights.server import WeightsServer, serving, url_for_others

log = logging.getLogger(__name__)

WEIGHTS = "weights"
LEARNER = "learner"
"""Name under which a learner leaves its notes."""


def weights_url(config: RunConfig, keys: Path | None) -> str:
    """Return the URL of the learner's versions, or "" if only the learner's host has them."""
    if not config.weights.http:
        return ""
    host, _, port = config.weights.http.rpartition(":")
    own = config.weights.advertised_host
    return url_for_others(own or host.strip("[]"), int(port), socket.gethostname(), keys)


LOOK_S = 1.0


class EndOfRun:
    """Looks in the run folder whether the learner has ended the run since this object was made.

    The weights server is no peer of the broker, and always on the learner's host. What an earlier learner has left does
    not count.
    """

    def __init__(self, folder: Path) -> None:
        self._result, self._note = folder / RESULT, folder / f"{LEARNER}.exit"
        self._folder, self._before = folder, self._seen()

    def has_come(self) -> bool:
        """Return whether the learner has said that the run is over, or has ended by an error that is final."""
        seen = self._seen()
        if seen[0] not in (None, self._before[0]) and says_over(self._folder):
            return True
        return seen[1] not in (None, self._before[1]) and read_note(self._folder, LEARNER) == FINAL

    def _seen(self) -> list[tuple[int, int] | None]:
        """Return what tells one result and one note of a learner from another; None for those that are not there."""
        found: list[tuple[int, int] | None] = []
        for path in (self._result, self._note):
            try:
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_ino))
            except OSError:
                found.append(None)
        return found


def serve_weights(config: RunConfig, folder: Path, keys: Path | None) -> bool:
    """Serve the learner's folder of versions, and the model, until SIGTERM, SIGINT or the end of the run.

    Returns:
        Whether the run is over.

    Raises:
        AddressRefused: other hosts could reach the address, and there is no token to ask for.
    """
    host, port = split_address("weights.http", config.weights.http, keys)
    versions = weights_folder(folder)
    scratch = SHARED_MEMORY if versions.parent == SHARED_MEMORY else folder
    server = WeightsServer(
        folder.name,
        lambda _, version: version_folder(versions, version),
        scratch,
        keys,
        model=partial(_model_of_run, config),
    )
    return asyncio.run(_serve(server, host, port, EndOfRun(folder)))


def _model_of_run(config: RunConfig) -> Path | None:
    from launch.fleet.ticket import model_folder

    try:
        return model_folder(config)
    except ConfigError as error:
        log.info("the model cannot be served: %s", error)
        return None


async def _serve(server: WeightsServer, host: str, port: int, end: EndOfRun) -> bool:
    stop, over = asyncio.Event(), False
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(server, host, port) as at:
        log.info("versions are served at %s:%d", host, at)
        while not (stop.is_set() or over):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_S)
            over = end.has_come()
    if over:
        log.info("ended: the run is over")
    return over


JUDGE = "judge"
SERVER = "vllm.entrypoints.openai.api_server"


def serve_judge(config: RunConfig, keys: Path | None, model_of_run: Callable[[RunConfig], str]) -> None:
    """Replace this process by the server.

    Args:
        keys: folder of the run's keys; None: every user of this host may ask.
        model_of_run: returns the folder of the model that the run starts from, and makes it if it is missing.

    Raises:
        ConfigError: the run has no `[judge]`, or its model cannot be found.
    """
    if config.judge is None:
        raise ConfigError(
            "there is no [judge] in the run file; add it, or name the URL of a judge in the reward"
        )
    from actors.generator.vllm_engine.engine import prepare_environment

    prepare_environment(config.generator.model_copy(update={"threads": config.judge.threads}))
    if key := judge_key(keys):
        os.environ["VLLM_API_KEY"] = key
    os.execv(sys.executable, server_command(config, judge_model(config, model_of_run)))


def judge_model(config: RunConfig, model_of_run: Callable[[RunConfig], str]) -> str:
    """Return the folder of the judge's model: its own, or the one that the run starts from."""
    from launch.model import existing

    if config.judge is None or not config.judge.model:
        return model_of_run(config)
    return str(existing(config.model.model_copy(update={"path": config.judge.model})))


def server_command(config: RunConfig, model: str) -> list[str]:
    """Return the command line of the server, with the engine settings of the generators."""
    from vllm.platforms import current_platform

    judge, generator = config.judge, config.generator
    assert judge is not None
    host, _, port = judge.http.rpartition(":")
    settings = {
        "--model": model,
        "--served-model-name": OWN_MODEL,
        "--host": host,
        "--port": port,
        "--dtype": generator.dtype_used,
        "--max-model-len": str(judge.max_model_len or generator.max_model_len),
        "--max-num-seqs": str(generator.max_num_seqs),
        "--generation-config": "vllm",
        "--seed": str(config.run.seed),
    }
    if current_platform.is_cpu():
        settings["--kv-cache-memory-bytes"] = str(generator.kv_cache_mb << 20)
        settings["--block-size"] = str(generator.block_size or 32)
    else:
        settings["--gpu-memory-utilization"] = str(generator.gpu_memory_utilization_used)
    eager = ["--enforce-eager"] if generator.enforce_eager_used else []
    return [sys.executable, "-m", SERVER, *(word for pair in settings.items() for word in pair), *eager]


def actor_environment(judge: JudgeSection | None, keys: Path | None) -> dict[str, str]:
    """Return the environment variables by which an actor of this host finds the judge; empty if there is none.

    Example:
        >>> actor_environment(JudgeSection(http="127.0.0.1:5758"), None)
        {'OFFBEAT_JUDGE_URL': 'http://127.0.0.1:5758/v1'}
    """
    if judge is None:
        return {}
    key = judge_key(keys)
    return {OWN_URL: f"http://{judge.http}/v1", **({OWN_KEY: key} if key else {})}


def judge_key(keys: Path | None) -> str:
    """Return the key that the judge asks for: a hash of the run's token; "" without keys.

    The token itself would be told to whoever takes the judge's port before it does.
    """
    return "" if keys is None else blake2b(read_tokens(keys)[0].encode(), person=b"judge").hexdigest()
