"""Runs `benchmarks.truncation.program`."""

from benchmarks.truncation.program import main

if __name__ == "__main__":
    main()
