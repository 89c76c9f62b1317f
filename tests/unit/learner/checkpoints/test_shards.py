"""Weights and averages come back bit by bit, however the ranks that write and those that read have cut them."""

import pytest
import torch
from safetensors.torch import load_file

from learner.errors import CheckpointError
from learner.update.checkpoint import MOMENTS, ShardPart, ShardReader, shard_file, write_shard

SIZES = {"long": 11, "short": 3}
WHOLE = {
    name: {kind: torch.rand(size, generator=torch.Generator().manual_seed(i)) for kind in ("weight", *MOMENTS)}
    for i, (name, size) in enumerate(SIZES.items())
}  # fmt: skip


def put(folder, cuts, *, model="policy", moments=True):
    """Write the parameters as ranks that have cut each of them at these shares of its length."""
    for rank, (low, high) in enumerate(zip([0.0, *cuts], [*cuts, 1.0], strict=True)):
        parts = []
        for name, size in SIZES.items():
            start, end = round(low * size), round(high * size)
            tensors = {
                kind: tensor[start:end] for kind, tensor in WHOLE[name].items() if moments or kind == "weight"
            }
            if start < end:
                parts.append(ShardPart(name, start, size, 7 if moments else 0, tensors))
        write_shard(shard_file(folder, model, rank), parts)


def read(reader, name, start, count):
    tensors = {kind: torch.full((count,), torch.nan) for kind in ("weight", *MOMENTS)}
    return reader.fill(name, start, tensors), tensors


@pytest.mark.parametrize("cuts", [[], [0.5], [0.3, 0.6], [0.1, 0.2, 0.9]])
def test_any_part_can_be_read_out_of_the_files_of_any_ranks(tmp_path, cuts):
    put(tmp_path, cuts)
    reader = ShardReader(tmp_path, "policy")
    assert reader.sizes() == SIZES
    for name, size in SIZES.items():
        for start in range(size):
            for end in range(start + 1, size + 1):
                steps, tensors = read(reader, name, start, end - start)
                assert steps == 7
                for kind, tensor in tensors.items():
                    assert torch.equal(tensor, WHOLE[name][kind][start:end])


def test_a_shard_is_an_ordinary_safetensors_file(tmp_path):
    put(tmp_path, [0.5], model="critic")
    found = load_file(shard_file(tmp_path, "critic", 1))
    assert found["place/long"].tolist() == [6, 11, 7]
    assert torch.equal(found["exp_avg_sq/short"], WHOLE["short"]["exp_avg_sq"][2:])


def test_averages_that_were_not_there_yet_are_zero(tmp_path):
    put(tmp_path, [0.5], moments=False)
    steps, tensors = read(ShardReader(tmp_path, "policy"), "long", 0, 11)
    assert steps == 0
    assert torch.equal(tensors["weight"], WHOLE["long"]["weight"])
    assert not any(tensors[kind].any() for kind in MOMENTS)


def test_what_is_not_there_is_named(tmp_path):
    put(tmp_path, [0.5])
    shard_file(tmp_path, "policy", 1).unlink()
    with pytest.raises(
        CheckpointError, match=r"lacks 5 of 11 numbers of long: the file of a rank is not there"
    ):
        read(ShardReader(tmp_path, "policy"), "long", 0, 11)
    with pytest.raises(CheckpointError, match=r"has no file critic-rank0\.safetensors: an earlier version"):
        ShardReader(tmp_path, "critic")


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"long": 12, "short": 3}, "has 11 numbers of long, this run's model has 12"),
        ({"long": 11}, "has 3 numbers of short, this run's model has none"),
        ({**SIZES, "value": 1}, "has no numbers of value, this run's model has 1"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, sizes, text):
    put(tmp_path, [])
    ShardReader(tmp_path, "policy").check(SIZES)
    with pytest.raises(CheckpointError, match=text):
        ShardReader(tmp_path, "policy").check(sizes)
