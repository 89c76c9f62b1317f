"""Runs `tests.campaigns.faults.program`."""

from tests.campaigns.faults.program import main

if __name__ == "__main__":
    main()
