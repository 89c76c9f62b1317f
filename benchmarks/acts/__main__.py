"""Runs `benchmarks.acts.program`."""

from benchmarks.acts.program import main

if __name__ == "__main__":
    main()
