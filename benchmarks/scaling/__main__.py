"""Runs `benchmarks.scaling.program`."""

from benchmarks.scaling.program import main

if __name__ == "__main__":
    main()
