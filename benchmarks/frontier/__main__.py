"""Runs `benchmarks.frontier.program`."""

from benchmarks.frontier.program import main

if __name__ == "__main__":
    main()
