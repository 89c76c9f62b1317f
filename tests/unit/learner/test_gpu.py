"""A rank refuses to train without its GPU, and has a shared one alone, or says who has it. torch is fake here."""

import types

import pytest
import torch

import learner.update.devices
from launch.errors import FINAL, exit_code
from learner.errors import GpuKept
from learner.process import SharedGpu
from learner.settings.learner import LearnerConfig
from learner.update.devices import forget_peak_memory, memory_metrics, take_gpu
from protocol.errors import GpuUnusable
from protocol.processes import GpuLock

GIVEN = LearnerConfig(devices=(2, 3), processes=2, gpu_memory_utilization=0.4)


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """Take away what `tests/conftest.py` sets for all other tests."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)


def test_without_gpus_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(learner.update.devices, "torch", None)
    take_gpu(LearnerConfig())


def test_a_rank_whose_deepspeed_was_told_to_take_the_cpu_ends_for_good(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    take_gpu(LearnerConfig())
    with pytest.raises(
        GpuUnusable, match=r"given GPUs \(2, 3\), but DS_ACCELERATOR is \"cpu\".*unset it"
    ) as e:
        take_gpu(GIVEN)
    assert exit_code(e.value) == FINAL


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that cannot use a GPU")
def test_a_rank_with_a_gpu_that_torch_cannot_use_ends_for_good(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(
        GpuUnusable, match=r"given GPUs \(2, 3\), but torch .* cannot compute on its GPU 1: "
    ) as e:
        take_gpu(GIVEN)
    assert exit_code(e.value) == FINAL


def test_a_rank_takes_its_gpu_and_its_part_of_the_memory(monkeypatch):
    calls = []

    class Cuda:
        def set_device(self, place):
            calls.append(("device", place))

        def set_per_process_memory_fraction(self, share, place):
            calls.append(("share", share, place))

    class Ones:
        def add_(self, number):
            return self

        def item(self):
            calls.append("computed")

    fake = types.SimpleNamespace(cuda=Cuda(), ones=lambda count, device: Ones(), __version__="fake")
    monkeypatch.setattr(learner.update.devices, "torch", fake)
    monkeypatch.setenv("LOCAL_RANK", "1")
    take_gpu(GIVEN)
    assert calls == ["computed", ("device", 1), ("share", 0.4, 1)]
    calls.clear()
    take_gpu(GIVEN.model_copy(update={"gpu_memory_utilization": 1.0}))
    assert calls == ["computed", ("device", 1)]


def test_memory_is_missing_on_a_cpu_and_not_zero():
    forget_peak_memory()
    assert memory_metrics() == {}


def test_memory_is_that_of_the_update_and_of_all_processes(monkeypatch):
    forgotten = []
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        reset_peak_memory_stats=lambda: forgotten.append(True),
        mem_get_info=lambda: (20_000_000_000, 80_000_000_000),
        max_memory_allocated=lambda: 30_000_000_000,
    )
    monkeypatch.setattr(learner.update.devices, "torch", types.SimpleNamespace(cuda=cuda))
    forget_peak_memory()
    assert forgotten == [True]
    assert memory_metrics() == {"learner/gpu_memory_peak_gb": 30.0, "learner/gpu_memory_used_share": 0.75}


def test_the_learner_says_who_keeps_the_gpu(tmp_path):
    generator = GpuLock(tmp_path)
    assert generator.take_together()
    gpu = SharedGpu(GpuLock(tmp_path), timeout_s=0.05)
    with pytest.raises(GpuKept, match=r"for 0\.05 s .*sleep_in_updates"), gpu.alone():
        pytest.fail("the GPU is not the learner's")
    assert gpu.waited_s is None
    generator.release()
    with gpu.alone():
        assert gpu.waited_s is not None
        assert not generator.take_together()
    assert generator.take_together()


def test_an_update_that_fails_gives_the_gpu_back(tmp_path):
    gpu, generator = SharedGpu(GpuLock(tmp_path), timeout_s=60.0), GpuLock(tmp_path)
    with pytest.raises(ZeroDivisionError), gpu.alone():
        raise ZeroDivisionError
    assert generator.take_together()


def test_without_a_lock_nobody_waits():
    gpu = SharedGpu(None, timeout_s=0.0)
    with gpu.alone():
        assert gpu.waited_s is None
