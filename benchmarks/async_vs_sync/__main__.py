"""Runs `benchmarks.async_vs_sync.program`."""

from benchmarks.async_vs_sync.program import main

if __name__ == "__main__":
    main()
