"""Runs `benchmarks.versus_trl.program`."""

from benchmarks.versus_trl.program import main

if __name__ == "__main__":
    main()
