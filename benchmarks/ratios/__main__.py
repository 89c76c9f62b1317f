"""Runs `benchmarks.ratios.program`."""

from benchmarks.ratios.program import main

if __name__ == "__main__":
    main()
