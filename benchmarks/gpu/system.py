"""Tokens per second through broker, generator and actors, and through a bare AsyncLLM, on one GPU.

Both engines are up at the same time and take turns. Each has its part of the GPU's memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.config import GeneratorConfig
from benchmarks.generation.system import Bare, System, Work
from benchmarks.gpu.setting import TEMPLATE_TOKENS, GpuSetting, make_model
from benchmarks.report import Figure
from protocol.security import key_files

INTERVALS = (16, 64)
"""Tokens in a chunk, `generator.stream_interval`: 16 is the default."""
ACTORS = 4
"""Actor processes, because one event loop does not carry a thousand episodes of a fast engine."""
MODE, FEW = "log-probs", 8
"""Sampling parameters of the bare engine, and the requests of a warm-up."""
ENGINE_SHARE = 0.42
"""Share of the GPU's memory that each engine has."""


def measure(setting: GpuSetting) -> list[Figure]:
    """Measure the first model with chunks of both sizes."""
    intervals = INTERVALS[:1] if setting.tiny or setting.quick else INTERVALS
    return [figure for interval in intervals for figure in rates(setting, setting.models[0], interval)]


def rates(setting: GpuSetting, name: str, interval: int) -> list[Figure]:
    """Return the tokens per second of several numbers of episodes, beside the bare engine."""
    folder = make_model(name, setting.shelf, setting.dtype, setting.device)
    crowds = (8,) if setting.tiny else (256, 1024) if setting.quick else (64, 256, 1024)
    prompt, answer = (16, 16) if setting.tiny else (128, 512)
    config = GeneratorConfig(
        dtype=setting.dtype_name,  # type: ignore[arg-type]
        max_model_len=prompt + answer + TEMPLATE_TOKENS,
        max_num_seqs=max(crowds),
        gpu_memory_utilization=ENGINE_SHARE,
        enforce_eager=setting.tiny or not setting.cuda,
        stream_interval=interval,
    )
    work = Work(requests=max(crowds), concurrent=max(crowds), prompt=prompt, answer=answer)
    with sides(setting, folder, config, work) as (system, bare):
        # The first round of each side is a warm-up.
        found = {crowd: [turn(system, bare, crowd) for _ in range(setting.repetitions)] for crowd in crowds}
    return [
        Figure(
            f"{name}, chunks of {interval}: {crowd} episodes, broker to actor",
            "tokens/s",
            [ours for ours, _ in turns],
            "bare AsyncLLM",
            [alone for _, alone in turns],
        )
        for crowd, turns in found.items()
    ]


@contextmanager
def sides(
    setting: GpuSetting, folder: Path, config: GeneratorConfig, work: Work
) -> Iterator[tuple[System, Bare]]:
    """Start both sides, one after the other, because an engine measures the GPU's memory when it starts."""
    run = setting.folder / f"run-{config.stream_interval}"
    key_files.make(keys := run.with_suffix(".keys"))
    system = System(folder, config, work, run, keys, None, actors=1 if setting.tiny else ACTORS)
    try:
        # Its engine has started once it has answered.
        system.round(FEW)
        bare = Bare(folder, config, work)
        try:
            bare.round(MODE, FEW)
            yield system, bare
        finally:
            bare.close()
    finally:
        system.close()


def turn(system: System, bare: Bare, crowd: int) -> tuple[float, float]:
    """Return the tokens per second of both sides with this number of episodes."""
    ours, alone = system.round(crowd), bare.round(MODE, crowd)
    return ours.tokens / ours.seconds, alone.tokens / alone.seconds
