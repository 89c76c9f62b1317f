"""Which models are written and stay, how long writing may take, and that shards come back however ranks cut them."""

import pytest
import torch
from safetensors.torch import load_file

from learner.errors import CheckpointError
from learner.run import WritePatience
from learner.run_files import best_model, best_of, remove_others, step_model, write_model
from learner.update.checkpoint import MOMENTS, ShardPart, ShardReader, shard_file, write_shard
from protocol.messages.fields import MAX_PATIENCE_S


def evaluation(step, accuracy, *, name="", return_mean=0.0):
    return {"set": name, "step": step, "accuracy": accuracy, "return_mean": return_mean}


def save(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def test_the_evaluation_before_the_first_step_is_never_the_best():
    assert best_of([evaluation(0, 0.9)], "") is None
    assert best_of([evaluation(0, 0.9), evaluation(5, 0.1)], "")["step"] == 5


def test_evaluations_without_a_result_and_of_other_sets_do_not_count():
    seen = [evaluation(5, 0.2), evaluation(10, None, return_mean=None), evaluation(10, 0.8, name="hard")]
    assert best_of(seen, "")["step"] == 5
    assert best_of(seen, "hard")["step"] == 10


def test_the_return_decides_where_nothing_says_what_is_right():
    seen = [evaluation(5, None, return_mean=1.0), evaluation(10, None, return_mean=3.0)]
    assert best_of(seen, "")["step"] == 10


def test_a_model_whose_writing_ends_half_way_is_not_there(tmp_path):
    def broken(folder):
        save(folder)
        raise OSError("disk full")

    folder = step_model(tmp_path, 5)
    with pytest.raises(OSError):
        write_model(folder, broken)
    assert not folder.exists()
    write_model(folder, save)
    write_model(folder, save)
    assert [path.name for path in folder.parent.iterdir()] == ["step-000005"]


def test_only_the_best_and_those_of_steps_that_are_done_stay(tmp_path):
    for folder in (
        *(best_model(tmp_path, 5), best_model(tmp_path, 10)),
        *(step_model(tmp_path, 10), step_model(tmp_path, 20)),
    ):
        write_model(folder, save)
    save(step_model(tmp_path, 10).with_name("step-000010.partial"))
    remove_others(tmp_path, best=5, newest=10)
    save(tmp_path / "models" / "mine")
    save(tmp_path / "models" / "best-step-5-copy")
    remove_others(tmp_path, best=5, newest=10)
    left = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert left == ["best-step-000005", "best-step-5-copy", "mine", "step-000010"]
    remove_others(tmp_path, best=None, newest=0)
    left = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert left == ["best-step-5-copy", "mine"], "what others put there stays"


def test_a_write_that_fails_has_ended_too():
    patience = WritePatience()
    with pytest.raises(OSError, match="disk"), patience.writing(10**9):
        raise OSError("disk full")
    assert (patience.patience_s, patience.writes) == (0.0, 1)


def test_no_write_asks_for_more_than_a_heartbeat_may_say():
    patience = WritePatience()
    with patience.writing(10**15):
        assert patience.patience_s == MAX_PATIENCE_S


def test_the_slowest_write_so_far_decides():
    times = iter([0.0, 100.0, 200.0, 201.0, 300.0, 310.0])
    patience = WritePatience(clock=lambda: next(times))
    asked = []
    for _ in range(3):
        with patience.writing(10**9):
            asked.append(patience.patience_s)
    assert asked == [20.0, 400.0, 400.0]


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
