"""Test what is decided for settings that the run file leaves to the hardware, with GPUs that only the test has."""

import pytest

from launch.errors import ConfigError
from launch.placement import placement
from launch.preflight.hardware import in_words, memory_shares, recompute_s, requests_at_once, resolved
from launch.preflight.memory import Gpu, ModelSize
from launch.run_file.load import check

H200 = Gpu("NVIDIA H200", 150.0, 149.0)
V100 = Gpu("Tesla V100", 34.0, 33.0, bfloat16=False)
SMALL = ModelSize(parameters=600_000_000, hidden=1024, inner=3072, layers=28)
LARGE = ModelSize(parameters=8_000_000_000, hidden=4096, inner=12288, layers=36)


def config(**sections):
    data = {"model": {"path": "m"}, "env": {"name": "calculator"}}
    return check(data | sections, "run.toml")


def decided(gpus, size=None, **sections):
    run = config(**sections)
    return resolved(run, placement(run, len(gpus)), gpus, size)


def test_without_gpus_a_run_computes_as_ever():
    run = config()
    found = resolved(run, placement(run, 0))
    learner, generator = found.learner, found.generator
    assert (learner.dtype, learner.zero_stage, learner.devices) == ("float32", "auto", ())
    assert (generator.dtype, generator.enforce_eager, generator.kv_on_update) == (
        "float32",
        True,
        "recomputed",
    )
    assert list(in_words(found, placement(run, 0))) == []
    # Roles that nobody has decided anything for compute in the same way.
    assert (run.learner.dtype_used, run.generator.dtype_used) == ("float32", "float32")
    assert (run.generator.enforce_eager_used, run.generator.kv_on_update_used) == (True, "recomputed")


@pytest.mark.parametrize(
    ("cores", "sections", "expected"),
    [
        (2, {}, (1, 1)),
        (16, {}, (8, 8)),
        (3, {"generator": {"count": 5}}, (1, 1)),
        (16, {"generator": {"count": 3}}, (4, 4)),
        (16, {"learner": {"processes": 2}, "generator": {"tensor_parallel_size": 2}}, (4, 4)),
        (16, {"learner": {"threads": 3}}, (3, 8)),
        (16, {"generator": {"backend": "http", "url": "http://127.0.0.1:1"}}, (16, 16)),
    ],
)
def test_processes_that_compute_share_the_cores(cores, sections, expected):
    run = config(**sections)
    found = resolved(run, placement(run, 0), size=SMALL, cores=cores)
    assert (found.learner.threads, found.generator.threads) == expected
    # Layers of a tiny model, and of one that is not known, are not divided.
    tiny = resolved(run, placement(run, 0), size=ModelSize(1_000_000, 64, 128, 2), cores=cores)
    assert tiny.generator.threads == 1
    assert resolved(run, placement(run, 0), cores=cores).generator.threads == 1


def test_only_an_optimizer_on_the_cpu_takes_cores_beside_gpus():
    run = config(learner={"processes": 4}, generator={"count": 4})
    found = resolved(run, placement(run, 8), [H200] * 8, LARGE, cores=192)
    assert (found.learner.threads, found.generator.threads) == (1, 1)
    run = config(learner={"offload": "optimizer"})
    found = resolved(run, placement(run, 2), [H200, H200], SMALL, cores=16)
    assert (found.learner.threads, found.generator.threads) == (16, 1)


def test_roles_with_gpus_of_their_own():
    found = decided([H200, H200])
    learner, generator = found.learner, found.generator
    assert (learner.dtype, learner.zero_stage, learner.devices) == ("bfloat16", 2, (0,))
    assert learner.gpu_memory_utilization == 1.0
    assert (generator.dtype, generator.enforce_eager, generator.devices) == ("bfloat16", False, (1,))
    assert generator.gpu_memory_utilization == 0.9
    assert list(in_words(found, placement(config(), 2))) == [
        "learner: bfloat16, ZeRO stage 2",
        "generators: bfloat16, compiled, with CUDA graphs, 0.9 of the GPU's memory, KV cache recomputed at updates",
    ]


def test_what_the_run_file_says_stays():
    own = {"dtype": "float32", "enforce_eager": True, "kv_on_update": "recomputed"}
    found = decided(
        [H200, H200],
        LARGE,
        generator=own | {"gpu_memory_utilization": 0.7},
        learner={"dtype": "float32", "zero_stage": 1, "gpu_memory_utilization": 0.5},
    )
    assert {name: getattr(found.generator, name) for name in own} == own
    assert found.generator.gpu_memory_utilization == 0.7
    assert (found.learner.dtype, found.learner.zero_stage) == ("float32", 1)
    assert found.learner.gpu_memory_utilization == 0.5


def test_a_gpu_that_does_not_compute_in_bfloat16_gets_float32():
    found = decided([V100, H200])
    assert (found.learner.dtype, found.learner.zero_stage, found.generator.dtype) == (
        "float32",
        0,
        "bfloat16",
    )


def test_a_gpu_that_nothing_is_known_of_gets_bfloat16():
    run = config()
    assert resolved(run, placement(run, 1)).learner.dtype == "bfloat16"


def test_a_server_of_others_has_no_gpu_here():
    found = decided([H200], generator={"backend": "http", "url": "http://h:1"})
    assert (found.learner.dtype, found.generator.dtype) == ("bfloat16", "float32")
    assert found.generator.gpu_memory_utilization == "auto"


def test_offloading_needs_a_stage_that_the_gpus_decide():
    assert decided([H200, H200], learner={"offload": "optimizer"}).learner.zero_stage == 2
    with pytest.raises(ConfigError, match="use zero_stage 2 or 3"):
        decided([], learner={"offload": "optimizer"})


def test_a_stage_that_trains_bfloat16_wrongly_is_refused_once_the_float_type_is_known():
    assert decided([], learner={"zero_stage": 0}).learner.zero_stage == 0
    with pytest.raises(ConfigError, match=r"zero_stage is 0 but learner.dtype is bfloat16"):
        decided([H200], learner={"zero_stage": 0})


def test_the_layout_of_a_decided_run_is_that_of_the_run():
    sections = {"learner": {"processes": 2}, "generator": {"count": 3, "tensor_parallel_size": 2}}
    for count in (3, 5, 8):
        run = config(**sections)
        placed = placement(run, count)
        again = resolved(run, placed, [H200] * count, SMALL)
        assert placement(again, count).posts == placed.posts
        assert resolved(again, placed, [H200] * count, SMALL) == again


def test_a_long_recomputation_keeps_the_cache():
    # 2 * 8e9 operations for each of 64 requests of 512 tokens: 1.3 s at 4e14 operations in a second.
    assert recompute_s(config(), LARGE.parameters) == pytest.approx(1.31, abs=0.01)
    assert decided([H200, H200], LARGE).generator.kv_on_update == "kept"
    assert decided([H200, H200], SMALL).generator.kv_on_update == "recomputed"
    # Two generators have half of the requests each, and two GPUs read them in half of the time.
    assert decided([H200] * 3, LARGE, generator={"count": 2}).generator.kv_on_update == "recomputed"
    wide = decided([H200] * 3, LARGE, generator={"tensor_parallel_size": 2})
    assert wide.generator.kv_on_update == "recomputed"
    assert decided([], LARGE).generator.kv_on_update == "recomputed"


def test_requests_at_a_time_are_bounded_by_episodes_and_by_tasks():
    assert requests_at_once(config()) == 2 * 32
    few = {"batch_trajectories": 8, "group_size": 8, "max_policy_lag": 1, "evaluation_tasks": 4}
    assert requests_at_once(config(learner=few)) == 2 * 8 + 4


def shares(gpus, size=None, **sections):
    run = config(**sections)
    placed = placement(run, len(gpus))
    return memory_shares(resolved(run, placed, gpus, size), placed, gpus, size)


def test_learner_and_engine_of_one_gpu_get_what_they_need_and_half_of_the_rest():
    engine, rank = shares([H200], SMALL)
    # The engine: 1 + 1.2 GB of 150. The rank: 1 + 9.6 + 1 GB, activations of 9.4 GB, and logits of 4.3 GB.
    assert engine == pytest.approx(0.40, abs=0.011)
    assert engine + rank == pytest.approx(0.95)
    assert shares([Gpu()]) == (0.47, pytest.approx(0.48))


def test_where_needs_exceed_the_memory_they_are_scaled():
    engine, rank = shares([Gpu("A100", 85.0)], LARGE)
    assert 0 < engine < 0.2
    assert engine + rank == pytest.approx(0.95)


def test_engines_that_share_a_gpu_share_its_memory():
    assert shares([H200, H200], SMALL, generator={"count": 3}) == (0.3, 1.0)


def test_a_stated_share_leaves_the_rest_to_the_learner():
    assert shares([H200], SMALL, generator={"gpu_memory_utilization": 0.3}) == (0.3, pytest.approx(0.65))
    with pytest.raises(ConfigError, match="leaves the learner nothing of a GPU that it shares"):
        shares([H200], SMALL, generator={"gpu_memory_utilization": 0.95})


LOCKSTEP = {"run": {"mode": "sync"}}


def test_in_lockstep_engines_sleep_on_a_gpu_that_they_share_with_the_learner():
    found = decided([H200], SMALL, **LOCKSTEP)
    assert found.generator.sleep_in_updates is True
    assert list(in_words(found, placement(config(**LOCKSTEP), 1)))[-1].endswith(
        "KV cache recomputed at updates, asleep while the learner updates"
    )


@pytest.mark.parametrize(
    ("gpus", "sections"),
    [
        (1, {}),
        (2, LOCKSTEP),
        (0, LOCKSTEP),
        (1, LOCKSTEP | {"generator": {"sleep_in_updates": False}}),
        (1, LOCKSTEP | {"learner": {"nodes": 2, "rendezvous": "10.0.0.1:29500"}}),
        (1, LOCKSTEP | {"generator": {"backend": "http", "url": "http://127.0.0.1:1"}}),
    ],
)
def test_otherwise_nobody_sleeps(gpus, sections):
    found = decided([H200] * gpus, SMALL, **sections)
    assert found.generator.sleep_in_updates is False
    assert placement(found, gpus).sleepers(found) == ()


def test_engines_that_sleep_get_all_but_what_the_learner_keeps_and_leave_it_nearly_all():
    engine, rank = shares([H200], SMALL, **LOCKSTEP)
    # The rank keeps 1 + 10.8 + 1 GB of 150, and a tenth more for the error of this estimate.
    assert engine == pytest.approx(0.95 - 1.1 * 13 / 150, abs=0.012)
    assert rank == pytest.approx(0.92)
    two, rank = shares([H200], SMALL, **LOCKSTEP, generator={"count": 2})
    assert two == pytest.approx(engine / 2, abs=0.011)
    assert rank == pytest.approx(0.89)
    # Nothing is known of the model: equal parts, and the learner still has the GPU alone in its updates.
    assert shares([Gpu()], **LOCKSTEP) == (0.47, pytest.approx(0.92))


def test_a_judge_beside_them_stays_awake():
    rows = {"train": "t", "reward": {"good": {"judge": "own", "prompt": "p"}}}
    engine, rank = shares([H200], SMALL, **LOCKSTEP, judge={}, env={"name": "rows", "params": rows})
    assert rank == pytest.approx(0.95 - 0.03 - engine, abs=0.006)


@pytest.mark.parametrize("setting", ["learner", "generator"])
def test_a_share_that_is_none_is_refused_in_words(setting):
    with pytest.raises(ConfigError) as caught:
        config(**{setting: {"gpu_memory_utilization": 1.5}})
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"run.toml: {setting}.gpu_memory_utilization: Input should be less than")
    assert lines[-1] == f"run.toml: {setting}.gpu_memory_utilization: Input should be 'auto', got 1.5"
