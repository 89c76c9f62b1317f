"""Runs `benchmarks.staleness.program`."""

from benchmarks.staleness.program import main

if __name__ == "__main__":
    main()
