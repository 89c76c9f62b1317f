"""Runs `benchmarks.broker.program`."""

from benchmarks.broker.program import main

if __name__ == "__main__":
    main()
