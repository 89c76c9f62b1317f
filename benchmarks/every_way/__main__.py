"""Runs `benchmarks.every_way.program`."""

from benchmarks.every_way.program import main

if __name__ == "__main__":
    main()
