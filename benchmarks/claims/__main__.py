"""Runs `benchmarks.claims.program`."""

from benchmarks.claims.program import main

if __name__ == "__main__":
    main()
