"""Runs a real server of vLLM, as a person starts it, on a port of this host."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from launch.processes import free_port

REPOSITORY = Path(__file__).parents[2]
START_S = 240.0
SMALL = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32", "--generation-config", "vllm"),
)
"""Arguments of an engine for a tiny model on a CPU."""


@contextlib.contextmanager
def serving(
    model: Path, log: Path, *arguments: str, start_s: float = START_S, **environment: str
) -> Iterator[str]:
    """Serve a model while the context lasts, and yield the server's URL once it answers.

    Args:
        model: folder of the model.
        log: file that the server writes to.
        arguments: further ones of vLLM's command line.
        start_s: longest time until it answers.
        environment: further variables.
    """
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *SMALL, *arguments]
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, env=os.environ | variables | environment, stdout=file, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process, log, start_s)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(url: str, process: subprocess.Popen, log: Path, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3_000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1.0):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError("the server does not answer: " + log.read_text()[-3_000:])
