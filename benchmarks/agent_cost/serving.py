"""`vllm serve` with the engine settings of our generator, and the agent that converses with it or with us."""

import asyncio
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from actors.config import GeneratorConfig
from actors.generator.vllm_engine.engine import engine_arguments
from benchmarks.agent_process import AgentProcess
from benchmarks.generation.system import Meter, Outcome, children
from launch.processes import free_port

START_S = 180.0
POLL_S = 0.2
STOP_S = 15.0
NOT_SERVED = (
    "skip_tokenizer_init",
    "worker_extension_cls",
    "weight_transfer_config",
    "model",
    "disable_log_stats",
)
"""Arguments of our engine that `vllm serve` does not get: it decodes text itself, and takes no weights."""
CLIENT = (sys.executable, "-m", "benchmarks.agent_cost.client")


@cache
def agents() -> AgentProcess:
    """Return this process's process of agents."""
    return AgentProcess(CLIENT)


async def run(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Have the agent converse on the endpoint. This is the agent function of suite `agent`."""
    await agents().ask({"prompt": row["prompt"], "base_url": base_url, "api_key": api_key})
    return 0.0


def serve_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return the command line flags of `vllm serve` for arguments of our engine.

    Example:
        >>> serve_flags({"seed": 0, "enforce_eager": True, "skip_tokenizer_init": True})
        ['--seed', '0', '--enforce-eager']
    """
    flags: list[str] = []
    for name, value in arguments.items():
        if name in NOT_SERVED:
            continue
        flag = "--" + name.replace("_", "-")
        match value:
            case True:
                flags.append(flag)
            case False:
                flags.append(flag.replace("--", "--no-", 1))
            case _:
                flags += [flag, str(value)]
    return flags


class Serve:
    """A `vllm serve` with the engine settings of our generator, and a process of agents.

    Args:
        cpu: whether the engine runs on a CPU.
    """

    def __init__(self, model: Path, config: GeneratorConfig, folder: Path, *, cpu: bool = True) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)),
            *("--disable-uvicorn-access-log", "--disable-log-stats"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *serve_flags(engine_arguments(config, model=str(model), seed=0, cpu=cpu)),
        ]
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": str(config.threads),
            "TORCHDYNAMO_DISABLE": "1",
        }
        self._log = folder / "serve.log"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self._agents = AgentProcess(CLIENT)
        self._wait()

    @property
    def pids(self) -> dict[str, list[int]]:
        """Process ids of server, engine and agents."""
        server = self._process.pid
        return {"server": [server], "engine": children(server), "agents": [self._agents.pid]}

    def round(self, prompts: Sequence[str], concurrent: int, more: Mapping[str, Any]) -> Outcome:
        """Have the conversations. ``more`` are further fields of each request."""
        meter, began = Meter(self.pids), time.perf_counter()
        jobs = [self._job(prompt, more) for prompt in prompts]
        results = asyncio.run(converse(self._agents, jobs, concurrent))
        seconds = time.perf_counter() - began
        return Outcome(sum(result["tokens"] for result in results), seconds, meter.used())

    def close(self) -> None:
        """End server and agents."""
        self._agents.close()
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)

    def _job(self, prompt: str, more: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt": prompt, "base_url": f"{self.url}/v1", "api_key": "none", "more": dict(more)}

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self.url}/health", timeout=1.0).close()
                return
            time.sleep(POLL_S)
        self.close()
        raise RuntimeError(f"vllm serve does not answer: {self._log.read_text()[-2_000:]}")


async def converse(
    agents: AgentProcess, jobs: Sequence[dict[str, Any]], concurrent: int
) -> list[dict[str, Any]]:
    """Have conversations, at most so many at a time. Return their results in the order of the jobs."""
    places = asyncio.Semaphore(concurrent)

    async def ask(job: dict[str, Any]) -> dict[str, Any]:
        async with places:
            return await agents.ask(job)

    return list(await asyncio.gather(*map(ask, jobs)))
