"""The actor's process imports no deep-learning library and no task library."""

import subprocess
import sys

HEAVY = ("torch", "vllm", "transformers", "deepspeed", "reasoning_gym", "sympy")


def test_the_actor_imports_nothing_heavy():
    modules = "actors.actor, envs.registry, envs.calculator, envs.reasoning_gym_suite"
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "actors.actor" in loaded
    assert [name for name in HEAVY if name in loaded] == []
