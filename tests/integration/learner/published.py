"""What an engine reports, publishes and saves, for tests to compare."""

from pathlib import Path

import torch

from learner.checkpoint_files import latest_name
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.learner import OptimizerConfig
from learner.update.checkpoint import ShardReader
from protocol.weights.format import layout
from tests.trajectories import make_batch_of_groups

TIMED = {"learner/step_seconds", "learner/tflops_per_rank"}
"""Metrics of an update that depend on the clock."""


def without_times(metrics):
    """Return the metrics of an update that do not depend on the clock."""
    return {name: value for name, value in metrics.items() if name not in TIMED}


def weights_of(engine):
    """Return the weights that an engine publishes, as copies by their names."""
    weights = engine.weights()
    header, places = layout(weights.shapes)
    memory = bytearray(len(header) + sum(place.nbytes for place in places))
    weights.copy_into(memoryview(memory), places, lambda nbytes: None)()
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return {
        p.name: whole[p.offset : p.offset + p.nbytes].clone().view(dtypes[p.dtype]).reshape(p.shape)
        for p in places
    }


def assert_weights_close(found, expected, atol):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def stored(folder: Path, model: str = "policy") -> dict[str, tuple[int, dict[str, torch.Tensor]]]:
    """Return steps, weight and averages of each parameter in the newest checkpoint of a folder."""
    reader = ShardReader(folder / latest_name(folder), model)
    result = {}
    for name, whole in reader.sizes().items():
        tensors = {kind: torch.full((whole,), torch.nan) for kind in ("weight", "exp_avg", "exp_avg_sq")}
        result[name] = reader.fill(name, 0, tensors), tensors
    return result


def assert_equal_checkpoints(one: Path, other: Path) -> None:
    """Compare weights, averages and steps of the newest checkpoints of two folders, bit by bit."""
    found, expected = stored(one), stored(other)
    assert found.keys() == expected.keys()
    for name, (steps, tensors) in expected.items():
        assert found[name][0] == steps, name
        for kind, tensor in tensors.items():
            assert torch.equal(found[name][1][kind], tensor), f"{kind} of {name}"


def resumed(start, folder: Path, state, *, lr: float, **settings):
    """Return an engine after three updates, and one that loaded its checkpoint of the first; their metrics are equal.

    Mini-batches are dealt at random, so the resumed run must continue the random sequence, too.
    """
    settings["algorithm"] = AlgorithmConfig(updates_per_batch=2)
    settings["optimizer"] = OptimizerConfig(lr=lr, schedule="linear", warmup_steps=3)
    batches = [make_batch_of_groups(2, 4, version=v) for v in range(3)]
    first = start(**settings)
    first.update(batches[0], current_version=0)
    first.save(folder, state)
    noise = torch.rand(3)
    expected = [first.update(batch, current_version=2).metrics for batch in batches[1:]]

    second = start(**settings)
    # This update makes a different past, which loading must overwrite.
    second.update(batches[2], current_version=2)
    assert second.load(folder) == state
    assert torch.equal(torch.rand(3), noise)
    found = [second.update(batch, current_version=2).metrics for batch in batches[1:]]
    for a, b in zip(expected, found, strict=True):
        assert without_times(a) == without_times(b)
    return first, second
