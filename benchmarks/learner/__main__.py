"""Runs `benchmarks.learner.program`."""

from benchmarks.learner.program import main

if __name__ == "__main__":
    main()
