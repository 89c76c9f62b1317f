"""Test what a run is told of shared memory, disk and places in the engines before it starts."""

import shutil
from collections import namedtuple

import pytest

from launch.placement import Placement, placement
from launch.preflight.examine import crowded_engines, too_little_room
from launch.preflight.memory import Gpu, ModelSize, bucket_bytes, engine_gb, rank_gb, too_little_gpu_memory
from launch.run_file.load import check
from learner.settings.learner import REDUCE_BUCKET

SIZE = ModelSize(parameters=100_000_000, hidden=500, inner=1500, layers=10)
Usage = namedtuple("Usage", "total used free")


def config(**sections):
    return check({"model": {"path": "m"}, "env": {"name": "calculator"}, **sections}, "run.toml")


@pytest.fixture
def disks(monkeypatch, tmp_path):
    """Let shared memory and the disk of the run folder have the sizes that the test says, in GB."""

    def with_sizes(shared_total=100.0, shared_free=100.0, disk_free=100.0):
        def usage(path):
            total, free = (shared_total, shared_free) if path == tmp_path else (1000.0, disk_free)
            return Usage(int(total * 1e9), int((total - free) * 1e9), int(free * 1e9))

        monkeypatch.setattr(shutil, "disk_usage", usage)
        return tmp_path

    return with_sizes


def test_with_room_nothing_is_said(disks):
    assert too_little_room(config(), SIZE, disks()) == ([], [])


def test_versions_beyond_shared_memory_are_refused_with_the_settings(disks):
    (line,), tight = too_little_room(config(), SIZE, disks(shared_total=0.067, shared_free=0.067))
    assert line.startswith("4 policy versions of 0.4 GB lie in ")
    assert (
        "it has 0.1 GB; make it larger (in a container with --shm-size), lower learner.keep_versions" in line
    )
    assert tight == []


def test_shared_memory_that_others_hold_is_said(disks):
    refused, (line,) = too_little_room(config(), SIZE, disks(shared_total=2.0, shared_free=1.0))
    assert refused == []
    assert "1.0 of its 2.0 GB are free" in line


def test_without_shared_memory_or_sizes_nothing_is_guessed(disks, tmp_path):
    disks(0.01, 0.01)
    assert too_little_room(config(), SIZE, tmp_path / "none") == ([], [])
    assert too_little_room(config(), None, tmp_path) == ([], [])


def test_a_disk_without_room_for_a_part_is_refused_and_one_with_little_for_all_is_said(disks):
    (line,), _ = too_little_room(config(), SIZE, disks(disk_free=1.0))
    assert "a checkpoint takes about 1.2 GB" in line
    assert "choose another run.dir" in line
    refused, (line,) = too_little_room(config(), SIZE, disks(disk_free=3.0))
    assert refused == []
    everything = "up to 4.8 GB (checkpoint 3 x 1.2 GB, model at the end 400 MB, best model 2 x 400 MB), but "
    assert everything in line
    once = config(learner={"checkpoint_every": 0})
    assert too_little_room(once, SIZE, disks(disk_free=3.0)) == ([], [])


def test_models_count_as_checkpoints_do(disks):
    # Adapters make small checkpoints, but the models that are written are whole.
    adapters = config(learner={"lora": {}})
    assert too_little_room(adapters, SIZE, disks(disk_free=1.3)) == ([], [])
    (line,), _ = too_little_room(adapters, SIZE, disks(disk_free=0.1))
    assert line.startswith("a model at the end takes about 400 MB, and ")
    exports = config(learner={"export_every": 10, "steps": 100, "keep_best": False, "evaluation_tasks": 0})
    _, (line,) = too_little_room(exports, SIZE, disks(disk_free=4.5))
    assert "exported model 10 x 400 MB" in line
    assert "best model" not in line


def test_more_requests_than_places_are_said():
    (line,) = crowded_engines(config(generator={"max_num_seqs": 24, "count": 2}))
    assert line.startswith("actors may send 64 requests at a time, but the generators run 48 (")
    assert list(crowded_engines(config(generator={"max_num_seqs": 32, "count": 2}))) == []
    theirs = {"max_num_seqs": 1, "backend": "http", "url": "http://h:1"}
    assert list(crowded_engines(config(generator=theirs))) == []


def gpus_of(run, gpus, size):
    return too_little_gpu_memory(run, placement(run, len(gpus)), gpus, size)


def decided(learner=None, generator=None):
    """Return a run with all settings as `launch.preflight.hardware` decides them for two GPUs."""
    learner = {"dtype": "bfloat16", "zero_stage": 2, "gpu_memory_utilization": 1.0} | (learner or {})
    generator = {"dtype": "bfloat16", "gpu_memory_utilization": 0.9} | (generator or {})
    return config(learner=learner, generator=generator)


def test_a_rank_takes_eighteen_bytes_a_parameter_and_its_passes():
    # The bucket of gradients that are reduced takes two more.
    assert rank_gb(decided(), SIZE, 0) == pytest.approx(1.0 + 1.8 + 0.2)
    assert rank_gb(decided({"processes": 2}), SIZE, 0) == pytest.approx(1.0 + 1.0 + 0.2)
    assert rank_gb(decided({"zero_stage": 3, "processes": 4}), SIZE, 0) == pytest.approx(1.0 + 0.45 + 0.2)
    assert rank_gb(decided({"lora": {}}), SIZE, 0) == pytest.approx(1.0 + 0.2)
    # 1,024 tokens * 2 bytes * 10 layers * (8 * 500 + 4 * 1500) values.
    assert rank_gb(decided(), SIZE, 1024) == pytest.approx(1.0 + 1.8 + 0.2 + 0.2048 + 4.3)
    fewer = decided({"gradient_checkpointing": True})
    assert rank_gb(fewer, SIZE, 1024) == pytest.approx(1.0 + 2.0 + 1024 * 2 * (10_000 + 5_000) / 1e9 + 4.3)
    assert engine_gb(decided(generator={"tensor_parallel_size": 2}), SIZE) == pytest.approx(1.1)


def test_the_bucket_of_reduced_gradients_ends_at_half_a_billion():
    large = ModelSize(parameters=8_000_000_000, hidden=4096, inner=12_288, layers=36)

    def bucket(size=large, **learner):
        return bucket_bytes(decided(learner).learner, size)

    assert bucket() == 2 * REDUCE_BUCKET == 1_000_000_000
    assert bucket(SIZE) == 2 * SIZE.parameters
    assert bucket(dtype="float32", zero_stage=0) == 0
    assert bucket(dtype="float32", zero_stage=0, processes=2) == bucket(dtype="float32") == 2_000_000_000
    assert bucket(lora={}) == 0
    critic = {"algorithm": {"critic": {"model": "separate"}, "advantage": {"kind": "gae"}}}
    assert bucket(**critic) == 1_000_000_000
    assert bucket(zero_stage=3, **critic) == 2_000_000_000


def test_an_offloaded_optimizer_takes_the_hosts_memory_instead_of_the_gpus():
    away = {"offload": "optimizer"}
    assert rank_gb(decided(away), SIZE, 0) == pytest.approx(1.0 + 0.2 + 0.2)
    assert rank_gb(decided(away | {"zero_stage": 3, "processes": 2}), SIZE, 0) == pytest.approx(
        1.0 + 0.1 + 0.2
    )
    gpus = [Gpu("x", 2.0), Gpu("x", 80.0)]
    assert 'set learner.offload = "optimizer"' in gpus_of(decided(), gpus, SIZE)[0][0]
    assert gpus_of(decided(away), gpus, SIZE)[0] == []


def test_what_fits_into_the_gpus_is_not_mentioned():
    assert gpus_of(decided(), [Gpu("x", 80.0, 79.0)] * 2, SIZE) == ([], [])


def test_a_learner_that_cannot_fit_is_refused_and_a_tight_one_is_said():
    (line,), _ = gpus_of(decided(), [Gpu("x", 2.0), Gpu("x", 80.0)], SIZE)
    assert line.startswith(
        "GPU 0: a rank of the learner takes at least 3.0 GB, and may use 2.0 of 2.0 GB; raise"
    )
    refused, (line,) = gpus_of(decided(), [Gpu("x", 5.0), Gpu("x", 80.0)], SIZE)
    assert refused == []
    assert "lower learner.micro_batch_tokens, which lets 8192 tokens through at once" in line
    half = decided({"gpu_memory_utilization": 0.5})
    assert len(gpus_of(half, [Gpu("x", 5.0), Gpu("x", 80.0)], SIZE)[0]) == 1


def test_an_evaluation_trains_nothing_on_the_gpu():
    run = decided()
    run = run.model_copy(update={"learner": run.learner.model_copy(update={"steps": 0})})
    assert gpus_of(run, [Gpu("x", 2.0), Gpu("x", 80.0)], SIZE) == ([], [])


def test_an_engine_that_cannot_fit_is_refused_and_a_tight_one_is_said():
    (line,), _ = gpus_of(decided(), [Gpu("x", 80.0), Gpu("x", 1.0)], SIZE)
    assert line.startswith(
        "GPU 1: an engine takes at least 1.2 GB, and may use 0.9 of 1.0 GB; raise generator."
    )
    _, (line,) = gpus_of(decided(), [Gpu("x", 80.0), Gpu("x", 1.5)], SIZE)
    assert line.startswith("GPU 1: an engine has 0.2 GB for the KV cache")


def test_engines_that_find_no_room_when_they_wake_are_refused():
    stays = decided({"gpu_memory_utilization": 0.92})
    run = stays.model_copy(
        update={"generator": stays.generator.model_copy(update={"sleep_in_updates": True})}
    )
    one = Placement({"learner": (0,), "generator-0": (0,)})
    (line,), _ = too_little_gpu_memory(run, one, [Gpu("x", 20.0)], SIZE)
    assert line.startswith(
        "GPU 0: the learner keeps about 3.0 GB between updates, and engines that wake beside it take 18.0, of 20.0 GB;"
    )
    assert too_little_gpu_memory(run, one, [Gpu("x", 80.0)], SIZE)[0] == []
    # An engine that never sleeps has its own part from the start.
    assert too_little_gpu_memory(stays, one, [Gpu("x", 20.0)], SIZE)[0] == []


def test_memory_that_others_hold_is_said():
    _, (line,) = gpus_of(decided(), [Gpu("x", 80.0), Gpu("x", 80.0, 20.0)], SIZE)
    assert line.startswith(
        "GPU 1: only 20.0 of 80.0 GB are free, and its engines want 72.0; end the processes"
    )


def test_what_is_not_known_is_said_to_be_unknown_once():
    refused, tight = gpus_of(decided(), [Gpu(), Gpu()], SIZE)
    assert (refused, tight) == (
        [],
        ["GPU 0: whether the run fits is unknown, because its memory is not known"],
    )
    assert "the model's size" in gpus_of(decided(), [Gpu("x", 80.0)] * 2, None)[1][0]
