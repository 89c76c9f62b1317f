"""Compares what a run asks for with the room there is: shared memory, disk, and places in the engines."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from launch.hardware import requests_at_once
from launch.preflight.memory import GB, ModelSize, version_bytes, versions_at_once
from launch.run_file.sections import RunConfig
from learner.run_files import SHARED_MEMORY

CHECKPOINT_BYTES = 12
"""Bytes on disk for each trained parameter: float32 weights and AdamW's two averages."""
CHECKPOINTS_AT_ONCE = 3
"""Checkpoints on disk at a time: two that are kept, and the one that is being written."""


def too_little_room(
    config: RunConfig, size: ModelSize | None, shared: Path = SHARED_MEMORY
) -> tuple[list[str], list[str]]:
    """Return what has no room on this host, and what may have none, a line each with the setting to change.

    Args:
        config: with every "auto" decided.
        size: sizes of the model; None: not known, and then only the places in the engines are looked at.
        shared: folder in shared memory, in which policy versions lie.
    """
    refused: list[str] = []
    tight = list(crowded_engines(config))
    if size is not None:
        for problems, lines in (_versions(config, size, shared), _checkpoints(config, size)):
            refused += problems
            tight += lines
    return refused, tight


def crowded_engines(config: RunConfig) -> Iterator[str]:
    """Yield a remark if actors may send more requests at a time than the generators run."""
    own, sent = config.generator, requests_at_once(config)
    places = own.max_num_seqs * own.count
    if own.backend == "vllm" and sent > places:
        yield (
            f"actors may send {sent} requests at a time, but the generators run {places} (generator.max_num_seqs x "
            "generator.count): the others wait in the engines. If it slows the run, raise max_num_seqs, or lower "
            "actor.concurrent_episodes"
        )


def _versions(config: RunConfig, size: ModelSize, shared: Path) -> tuple[list[str], list[str]]:
    if not shared.is_dir():
        return [], []
    count, each_gb = versions_at_once(config), version_bytes(config, size) / GB
    usage = shutil.disk_usage(shared)
    what = f"{count} policy versions of {each_gb:.1f} GB lie in {shared} at a time"
    cure = (
        "make it larger (in a container with --shm-size), lower learner.keep_versions, or set learner.publish_dtype "
        "to bfloat16"
    )
    if count * each_gb > usage.total / GB:
        return [f"{what}, but it has {usage.total / GB:.1f} GB; {cure}"], []
    if count * each_gb > usage.free / GB:
        return [], [f"{what}, and {usage.free / GB:.1f} of its {usage.total / GB:.1f} GB are free; {cure}"]
    return [], []


def _checkpoints(config: RunConfig, size: ModelSize) -> tuple[list[str], list[str]]:
    learner = config.learner
    if learner.lora is not None or not learner.steps:
        return [], []
    folder = config.run.dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    each_gb = CHECKPOINT_BYTES * size.parameters / GB
    often = learner.steps // learner.checkpoint_every if learner.checkpoint_every else 0
    count, free_gb = min(CHECKPOINTS_AT_ONCE, often + 1), shutil.disk_usage(there).free / GB
    what = f"a checkpoint takes about {each_gb:.1f} GB, and {there} has {free_gb:.1f} GB free"
    if each_gb > free_gb:
        return [f"{what}; free some space, or choose another run.dir"], []
    if count * each_gb > free_gb:
        return [], [f"{what}, but {count} lie there at a time; free some space, or choose another run.dir"]
    return [], []
