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


@pytest.fixture
def harnesses(root):
    """Return a function that runs agents, and returns the lines of those that hold."""

    def run(*options):
        done = subprocess.run(
            [sys.executable, "-m", "tests.campaigns.harnesses", "--venvs", "build/harnesses", *options],
            cwd=root, capture_output=True, text=True, timeout=580,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if "| yes |" in line]

    return run


def test_unchanged_agents_are_recorded_as_they_were_sampled(harnesses):
    assert len(harnesses("--only", *AGENTS)) == len(AGENTS)


def test_an_agent_whose_connection_is_lost_asks_again_and_is_sampled_once(harnesses):
    [line] = harnesses("--lose-first", "--only", "langgraph")
    assert "| 3 | 1 | the same bytes, and says so |" in line
