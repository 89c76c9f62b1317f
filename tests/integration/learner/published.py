"""What an engine reports, publishes and saves, for tests to compare."""

from pathlib import Path

import torch

from learner.checkpoint_files import latest_name
from learner.update.checkpoint import ShardReader
from protocol.weights.format import layout

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
