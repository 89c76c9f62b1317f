"""Runs `benchmarks.harnesses.program`."""

from benchmarks.harnesses.program import main

if __name__ == "__main__":
    main()
