"""Agents of other libraries, in virtual environments of their own, are recorded token by token as they were sampled."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(600)
AGENTS = (
    "langgraph",
    "openai-agents, sub-agents",
    "smolagents, tool calls",
    "smolagents, code",
    "strands, window",
)


def test_unchanged_agents_are_recorded_as_they_were_sampled(root):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.harnesses", "--venvs", "build/harnesses", "--only", *AGENTS],
        cwd=root, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| yes |") == len(AGENTS)
