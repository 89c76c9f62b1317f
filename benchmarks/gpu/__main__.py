"""Runs `benchmarks.gpu.program`."""

from benchmarks.gpu.program import main

if __name__ == "__main__":
    main()
