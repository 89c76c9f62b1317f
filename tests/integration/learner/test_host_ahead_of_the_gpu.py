"""While micro-batches are queued, the host reads nothing back, so that it stays ahead of a GPU.

A CPU computes at once, so what is tested is that no operation comes for which the host would have to wait for a GPU.
"""

import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from learner.settings.learner import LearnerConfig
from learner.update.devices import no_packed_rows
from learner.update.engine import TrainingEngine
from learner.update.updater import Updater
from tests.methods import COMPARED, METHODS
from tests.trajectories import make_trajectory

LEARNER = Path(__file__).parents[3] / "learner"
WAITS = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "masked_select", "nonzero", "repeat_interleave",
    "unique_consecutive", "unique_dim",
}  # fmt: skip
"""Operations whose result the host reads, or whose size depends on numbers."""
ON_A_CPU_ONLY = "scaled = logits.is_cuda or bool((temperature != 1).any())"
"""Line of `learner.update.target_logp` that reads a number where there is no GPU."""


class Watch(TorchDispatchMode):
    """Notes the lines of the learner from which operations come that make the host wait."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = name.startswith(("index", "_index")) and isinstance(args[1], list | tuple)
        if name in WAITS or (masks and any(t is not None and t.dtype == torch.bool for t in args[1])):
            ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(LEARNER))]
            self.found.add((name, ours[-1].line if ours else ""))
        return function(*args, **(kwargs or {}))


def batch():
    """Return two groups in which some tokens are too old to carry gradient."""
    rng = np.random.default_rng(0)
    return [
        make_trajectory(
            f"g{g}.{i}", group=f"g{g}", prompt=3, actions=5 + i, reward=float(rng.random()), version=i % 2
        )
        for g in range(2)
        for i in range(4)
    ]


@pytest.mark.parametrize("name", [*METHODS, *COMPARED])
def test_no_number_is_read_while_passes_are_queued(model, monkeypatch, name):
    watch, loss = Watch(), Updater._policy_loss

    def watched(self, *arguments):
        with watch:
            return loss(self, *arguments)

    monkeypatch.setattr(Updater, "_policy_loss", watched)
    config = LearnerConfig.model_validate(
        {"algorithm": (METHODS | COMPARED)[name], "micro_batch_tokens": 64, "max_policy_lag": 0}
    )
    engine = TrainingEngine(config, model=model, total_steps=10, seed=5)
    try:
        assert engine.update(batch(), current_version=1).metrics["learner/trained_tokens"] > 0
    finally:
        engine.close()
    assert {line for _, line in watch.found} <= {ON_A_CPU_ONLY}, watch.found


def test_the_watch_sees_what_makes_the_host_wait():
    watch, numbers = Watch(), torch.tensor([1.0, 2.0])
    for read in (
        lambda: float(numbers.sum()),
        lambda: numbers[numbers > 1],
        lambda: torch.unique(numbers),
        lambda: bool((numbers > 1).any()),
    ):
        watch.found.clear()
        with watch:
            read()
        assert watch.found


def test_transformers_asks_our_function_for_packed_rows(model):
    """transformers has a function of that name, which finds nothing in the rows of the learner."""
    engine = TrainingEngine(LearnerConfig(), model=model, total_steps=1, seed=0)
    try:
        assert masking_utils.find_packed_sequence_indices is no_packed_rows
        assert "find_packed_sequence_indices(position_ids)" in Path(masking_utils.__file__).read_text()
    finally:
        engine.close()
