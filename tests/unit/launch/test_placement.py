"""Test which GPUs each process gets, and that an impossible layout is refused with the cure."""

import importlib.machinery

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import launch.placement
from launch.errors import ConfigError
from launch.placement import Placement, placement, torch_uses_gpus, visible_gpus
from launch.run_file.load import check
from launch.supervise.posts import ALLOCATOR, Post
from protocol.processes import VARIABLE


def config(*, learner=None, generator=None, **sections):
    data = {
        "model": {"path": "m"},
        "env": {"name": "calculator"},
        "learner": learner or {},
        "generator": generator or {},
        **sections,
    }
    return check(data, "doc")


def posts(gpus, **sections):
    return placement(config(**sections), gpus).posts


def test_without_gpus_nothing_is_placed():
    placed = placement(config(), 0)
    assert (placed.posts, placed.remarks, placed.sentence()) == ({}, (), "")
    assert placed.environment("learner", []) == {}


def test_eight_gpus_two_ranks_and_generators_of_two():
    placed = placement(config(learner={"processes": 2}, generator={"count": 3, "tensor_parallel_size": 2}), 8)
    assert placed.posts == {
        "learner": (0, 1),
        "generator-0": (2, 3),
        "generator-1": (4, 5),
        "generator-2": (6, 7),
    }
    assert placed.remarks == ()
    assert placed.sentence() == (
        "GPUs: learner 0 and 1, generator-0 2 and 3, generator-1 4 and 5, generator-2 6 and 7"
    )


def test_learner_and_generator_share_the_only_gpu_and_a_remark_says_so():
    placed = placement(config(), 1)
    assert placed.posts == {"learner": (0,), "generator-0": (0,)}
    assert placed.remarks == ("GPU 0 is shared by learner and generator-0",)


def test_idle_gpus_are_named():
    assert placement(config(), 4).remarks == (
        "GPU 2, 3 of 4 would be idle; raise generator.count or learner.processes to use all",
    )


def test_the_settings_decide_where_they_are_given():
    assert posts(4, learner={"devices": [3]}, generator={"count": 2, "devices": [0, 2]}) == {
        "learner": (3,),
        "generator-0": (0,),
        "generator-1": (2,),
    }
    assert posts(2, generator={"devices": [0]}) == {"learner": (1,), "generator-0": (0,)}


def test_a_judge_takes_the_freest_gpu():
    rows = {"name": "rows", "params": {"train": "t", "reward": {"good": {"judge": "own", "prompt": "p"}}}}
    assert posts(3, env=rows, judge={})["judge"] == (2,)


def test_engines_of_others_take_no_gpu():
    assert posts(2, generator={"backend": "http", "url": "http://127.0.0.1:1"}) == {"learner": (0,)}


@pytest.mark.parametrize(
    ("sections", "gpus", "words"),
    [
        ({"learner": {"devices": [0]}}, 0, r"learner\.devices is \[0\], but this host shows no GPU"),
        ({"learner": {"devices": [4]}}, 4, r"learner\.devices names GPU 4, but there are 4, counted from 0"),
        ({"learner": {"devices": [0, 1]}}, 4, r"names 2 GPUs, but learner\.processes is 1"),
        ({"learner": {"processes": 2, "devices": [1, 1]}}, 4, r"devices is \[1, 1\]: it names a GPU twice"),
        ({"learner": {"processes": 3}}, 2, r"processes is 3, but there are 2 GPUs, and ranks cannot share"),
        ({"generator": {"tensor_parallel_size": 4}}, 2, r"size is 4, but there are 2 GPUs; lower it to 2"),
        (
            {"generator": {"tensor_parallel_size": 2, "devices": [1]}},
            4,
            r"generator\.devices names 1 GPUs; lower it to 1",
        ),
        (
            {"generator": {"count": 3, "gpu_memory_utilization": 0.5}},
            2,
            r"GPU 1 is shared by generator-0, generator-1, generator-2, .* = 0\.5 of .* at most 0\.33",
        ),
    ],
)
def test_an_impossible_layout_is_refused_with_the_cure(sections, gpus, words):
    with pytest.raises(ConfigError, match=words):
        placement(config(**sections), gpus)


@settings(deadline=None)
@given(
    gpus=st.integers(1, 16),
    ranks=st.integers(1, 8),
    count=st.integers(1, 6),
    size=st.sampled_from([1, 2, 4]),
    share=st.sampled_from([0.05, 0.5]),
)
def test_every_layout_is_whole_or_refused(gpus, ranks, count, size, share):
    made = config(
        learner={"processes": ranks},
        generator={"count": count, "tensor_parallel_size": size, "gpu_memory_utilization": share},
    )
    try:
        placed = placement(made, gpus).posts
    except ConfigError:
        return
    assert len(set(placed["learner"])) == len(placed["learner"]) == ranks
    generators = [places for post, places in placed.items() if post != "learner"]
    assert len(generators) == count
    assert all(len(set(places)) == len(places) == size for places in generators)
    assert all(0 <= place < gpus for places in placed.values() for place in places)
    used = [place for places in placed.values() for place in places]
    if ranks + count * size <= gpus:
        assert len(set(used)) == len(used), "nobody shares a GPU while there are enough"


@pytest.mark.parametrize(
    ("version", "uses"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n", True),
    ],
)
def test_a_torch_for_the_cpu_uses_no_gpus(tmp_path, monkeypatch, version, uses):
    (tmp_path / "__init__.py").touch()
    (tmp_path / "version.py").write_text(version)
    found = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(launch.placement, "find_spec", lambda name: found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert torch_uses_gpus() is uses
    assert visible_gpus() == (["0", "1"] if uses else [])


def test_the_users_own_list_of_gpus_is_what_is_divided(monkeypatch):
    monkeypatch.setattr(launch.placement, "torch_uses_gpus", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc,-1,7")
    assert visible_gpus() == ["5", "GPU-abc"]
    placed = Placement({"learner": (1,), "generator-0": (0,)})
    assert placed.environment("learner", visible_gpus()) == {"CUDA_VISIBLE_DEVICES": "GPU-abc"}
    assert placed.environment("actor-0", visible_gpus()) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_processes_that_share_a_gpu_start_one_after_the_other():
    rows = {"name": "rows", "params": {"train": "t", "reward": {"good": {"judge": "own", "prompt": "p"}}}}
    placed = placement(config(env=rows, judge={}, generator={"count": 2}), 1)
    assert {post: placed.start_after(post) for post in placed.posts} == {
        "generator-0": (),
        "generator-1": ("generator-0",),
        "learner": ("generator-0", "generator-1"),
        "judge": ("generator-0", "generator-1", "learner"),
    }
    apart = placement(config(), 2)
    assert [apart.start_after(post) for post in ("learner", "generator-0", "broker")] == [(), (), ()]


def test_the_learner_and_engines_that_sleep_find_one_lock(tmp_path):
    made = config(generator={"count": 2, "sleep_in_updates": True}, run={"mode": "sync"})

    def locked(gpus):
        placed = placement(made, gpus)
        posts = ["broker", "learner", "generator-0", "generator-1", "actor-0"]
        found = {post: Post(post, 1).lock_environment(placed, made, tmp_path) for post in posts}
        assert all(env in ({}, {VARIABLE: str(tmp_path / "gpu-lock")}) for env in found.values())
        return [post for post, env in found.items() if env]

    assert locked(1) == ["learner", "generator-0", "generator-1"]
    # generator-1 has a GPU of its own.
    placed = Placement({"learner": (0,), "generator-0": (0,), "generator-1": (1,)})
    assert placed.sleepers(made) == ("generator-0",)
    assert locked(3) == []
    # Without GPUs the run file alone decides, so that it can be tried on a CPU.
    assert locked(0) == ["learner", "generator-0", "generator-1"]


def test_the_learners_memory_grows_in_blocks_unless_the_user_has_settings(monkeypatch):
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    placed = Placement({"learner": (1,), "generator-0": (0,)})
    found = Post("learner", 1).gpu_environment(placed, ["5", "7"])
    assert found == {"CUDA_VISIBLE_DEVICES": "7", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert Post("generator-0", 1).gpu_environment(placed, ["5", "7"]) == {"CUDA_VISIBLE_DEVICES": "5"}
    assert Post("learner", 1).gpu_environment(Placement(), []) == {}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert Post("learner", 1).gpu_environment(placed, ["5", "7"]) == {"CUDA_VISIBLE_DEVICES": "7"}
