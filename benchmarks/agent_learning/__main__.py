"""Runs `benchmarks.agent_learning.program`."""

from benchmarks.agent_learning.program import main

if __name__ == "__main__":
    main()
