"""Runs `benchmarks.faults.program`."""

from benchmarks.faults.program import main

if __name__ == "__main__":
    main()
