"""Hosts with a broker or an actor need neither matplotlib nor sympy, and what does need them says so."""

import importlib.metadata as metadata
import subprocess
import sys
from pathlib import Path

import pytest

from envs.errors import EnvError
from envs.registry import make_suite
from launch.supervise import summary as summary_module
from tests.constraints import closure

ROOT = Path(__file__).parents[3]
HEAVY = ("matplotlib", "sympy", "reasoning_gym", "torch", "transformers", "vllm", "deepspeed", "tensorboard")
BLOCKED = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None
"""


MOST_BYTES = 200e6
"""Bound of the base installation; docs/run/operations.md has what was measured, and what an earlier one took."""


def test_the_base_installation_stays_small():
    packages = closure([])
    assert not set(packages) & {name.replace("_", "-") for name in HEAVY}
    total = 0
    for name in packages:
        files = metadata.distribution(name).files or []
        # Compiled files are made by pip or Python, of a size that depends on both.
        total += sum(file.size or 0 for file in files if file.suffix != ".pyc")
    assert 50e6 < total < MOST_BYTES, sorted(packages)


def alone(code):
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "modules",
    [
        "broker.service, broker.metrics, launch.role",
        "actors.actor, envs.rows.suite, envs.tools.suite, envs.agent.suite, launch.role",
        "launch.cli, launch.supervise.supervisor, launch.preflight.examine, launch.commands.status",
    ],
    ids=["broker", "actor", "command line"],
)
def test_a_role_starts_where_heavy_packages_are_missing(modules):
    done = alone(f"import {modules}")
    assert done.returncode == 0, done.stderr


def test_an_environment_that_needs_the_library_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, params in (("reasoning_gym", {"family": "spell_backward"}), ("calculator", {})):
        with pytest.raises(EnvError, match=r"pip install '\.\[tasks\]'"):
            make_suite(name, params)


def test_without_matplotlib_there_is_no_curve_and_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError):
        summary_module.draw_curve([], [], tmp_path / "curve.png", title="run")
