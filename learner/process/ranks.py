"""Starts the ranks of a learner: rank 0 gets the engine and leads, the other ranks follow."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from learner.config import LearnerConfig
from learner.errors import ModelUnusable
from learner.process.stopping import Stop, leave
from protocol.errors import WeightsError
from protocol.weights.format import check_names

if TYPE_CHECKING:
    from learner.process.shared_gpu import SharedGpu
    from learner.update.engine import TrainingEngine


def lead(
    config: LearnerConfig,
    stop: Stop,
    gpu: "SharedGpu",
    *,
    model: str,
    seed: int,
    segment_tokens: int | None,
    run_dir: Path,
) -> "TrainingEngine":
    """Return the engine on rank 0. Other ranks follow rank 0 until the end and do not return.

    Args:
        gpu: GPUs of all ranks, which the learner has alone while it loads the model.

    Raises:
        GpuKept: a generator did not fall asleep in time.
        ModelUnusable: the engine would publish other tensors than those of the model's folder.
        HostsDiffer: the hosts of the learner have different settings, or do not share the run folder.
    """
    from learner.update.engine import TrainingEngine

    rank = int(os.environ.get("RANK", "0"))
    if rank > 0:
        # Only rank 0 decides when to end.
        stop.ignore()
    if config.nodes > 1:
        meet(config, run_dir, model=model, seed=seed)
    # Invariant: the other ranks load nothing before rank 0 joins them, which has the GPUs alone by then.
    with gpu.alone() if rank == 0 else nullcontext():
        engine = TrainingEngine(
            config, model=model, total_steps=max(1, config.steps), seed=seed, segment_tokens=segment_tokens
        )
    if rank > 0:
        engine.follow()
        leave()
    if Path(model).is_dir():
        try:
            check_names(engine.weights().shapes, Path(model))
        except WeightsError as error:
            raise ModelUnusable(str(error)) from None
    return engine


def meet(config: LearnerConfig, run_dir: Path, *, model: str, seed: int) -> None:
    """Form the group of ranks, and make sure that all hosts agree. This is a collective call.

    Raises:
        HostsDiffer: the hosts of the learner have different settings, or do not share the run folder.
    """
    from learner.gpu import take_gpu
    from learner.update import ranks
    from learner.update.deepspeed_zero import join_ranks

    take_gpu(config)
    join_ranks(config)
    ranks.check_hosts(config, run_dir, model=Path(model), seed=seed)
