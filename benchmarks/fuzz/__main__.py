"""Runs `benchmarks.fuzz.program`."""

from benchmarks.fuzz.program import main

if __name__ == "__main__":
    main()
