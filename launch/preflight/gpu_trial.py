"""Tries whether torch can use the visible GPUs, and asks for their memory, before anything starts."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from launch.errors import ConfigError
from launch.placement import VARIABLE, Placement
from launch.preflight.gpu_memory import Gpu

TRY_S = 180.0
OLDEST_BFLOAT16 = 8
"""First major version of the compute capability that computes in bfloat16 (Ampere)."""


def try_gpus(count: int) -> list[Gpu]:
    """Return what torch tells of the visible GPUs; without torch, that nothing is known.

    A process of its own asks, because the caller may live as long as the run and must not hold a GPU.

    Args:
        count: number of visible GPUs.

    Raises:
        ConfigError: the GPUs do not answer within `TRY_S`.
    """
    if not count:
        return []
    command = [sys.executable, "-m", "launch.preflight.gpu_trial", str(count)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRY_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the GPUs have not answered for {TRY_S:g} s; look at nvidia-smi, or set {VARIABLE} to those that work"
        ) from None
    return read_answer(done.stdout, count)


def read_answer(text: str, count: int) -> list[Gpu]:
    """Return the GPUs that the last line of an answer describes; if there is no such line, that nothing is known.

    Example:
        >>> read_answer('[{"name": "A100", "memory_gb": 42.0}]', 1)[0].memory_gb
        42.0
        >>> read_answer("", 2)[1].memory_gb is None
        True
    """
    try:
        return [Gpu(**found) for found in json.loads(text.strip().rpartition("\n")[2])]
    except (ValueError, TypeError):
        return [Gpu()] * count


def unusable(placed: Placement, gpus: Sequence[Gpu]) -> tuple[list[str], list[str]]:
    """Return a line for each GPU that a process has and torch cannot use, and one for each such GPU that is idle."""
    used = placed.by_gpu()
    refused: list[str] = []
    idle: list[str] = []
    for place, gpu in enumerate(gpus):
        if gpu.trouble:
            line = f"GPU {place} cannot be used: {gpu.trouble}"
            cure = f"; mend that (nvidia-smi shows the driver), or set {VARIABLE} to the GPUs that work"
            (refused if place in used else idle).append(f"{line}{cure if place in used else ''}")
    return refused, idle


def without_bfloat16(placed: Placement, gpus: Sequence[Gpu]) -> Iterator[str]:
    """Yield the GPUs in use that do not compute in bfloat16, so that their roles compute in float32."""
    for place in placed.by_gpu():
        if place < len(gpus) and not gpus[place].bfloat16:
            yield f"GPU {place} ({gpus[place].name}) does not compute in bfloat16: its roles compute in float32"


def ask(count: int) -> list[dict[str, Any]]:
    """Compute on each visible GPU, and return the fields of a `Gpu` for each."""
    import torch

    found: list[dict[str, Any]] = []
    for place in range(count):
        try:
            # A card that a driver lists may still lack kernels for it in this build of torch.
            torch.ones(1, device=f"cuda:{place}").add_(1).item()
            about = torch.cuda.get_device_properties(place)
            free, _ = torch.cuda.mem_get_info(place)
        except (RuntimeError, AssertionError) as error:
            found.append({"trouble": " ".join(str(error).split())[:400]})
            continue
        found.append(
            {
                "name": about.name,
                "memory_gb": about.total_memory / 1e9,
                "free_gb": free / 1e9,
                "bfloat16": about.major >= OLDEST_BFLOAT16,
            }
        )
    return found


def main() -> None:
    """Print what torch tells of the visible GPUs, as a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m launch.preflight.gpu_trial", description=main.__doc__)
    parser.add_argument("count", type=int)
    sys.stdout.write(json.dumps(ask(parser.parse_args().count)) + "\n")


if __name__ == "__main__":
    main()
