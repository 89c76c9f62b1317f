"""Runs `benchmarks.weights.program`."""

from benchmarks.weights.program import main

if __name__ == "__main__":
    main()
