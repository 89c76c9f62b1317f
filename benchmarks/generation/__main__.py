"""Runs `benchmarks.generation.program`."""

from benchmarks.generation.program import main

if __name__ == "__main__":
    main()
