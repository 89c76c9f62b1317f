"""Runs `benchmarks.agent_cost.program`."""

from benchmarks.agent_cost.program import main

if __name__ == "__main__":
    main()
