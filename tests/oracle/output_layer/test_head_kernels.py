"""The kernels of the output layer compute the formula. Here Triton's interpreter runs them, on a GPU `tests/gpu`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from learner.update import target_logp

ROOT = Path(__file__).parents[3]


def test_the_kernels_compute_the_formula():
    pytest.importorskip("triton")
    # The interpreter has to be chosen before Triton is imported.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.oracle.output_layer.kernel_checks"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "the kernels agree with the formula" in done.stdout, done.stderr[-3000:]


def test_a_gpu_without_a_compiler_is_told_once_and_torch_computes(monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(target_logp, "forward", fails)
    target_logp._compiled.cache_clear()
    device = torch.device("cpu")
    assert not target_logp._compiled(device)
    assert not target_logp._compiled(device)
    target_logp._compiled.cache_clear()
    assert len(caplog.messages) == 1
    assert "Failed to find C compiler" in caplog.messages[0]


def test_a_cpu_takes_no_kernels():
    assert not target_logp.usable(torch.device("cpu"))
