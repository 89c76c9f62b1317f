"""The learner has a shared GPU alone, or says who keeps it."""

import pytest

from learner.errors import GpuKept
from learner.process import SharedGpu
from protocol.processes import GpuLock


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
    gpu, generator = SharedGpu(GpuLock(tmp_path), timeout_s=1.0), GpuLock(tmp_path)
    with pytest.raises(ZeroDivisionError), gpu.alone():
        raise ZeroDivisionError
    assert generator.take_together()


def test_without_a_lock_nobody_waits():
    gpu = SharedGpu(None, timeout_s=0.0)
    with gpu.alone():
        assert gpu.waited_s is None
