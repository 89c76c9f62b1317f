"""Runs `tests.campaigns.fuzz.program`."""

from tests.campaigns.fuzz.program import main

if __name__ == "__main__":
    main()
