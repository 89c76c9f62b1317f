"""Runs `tests.campaigns.harnesses.program`."""

from tests.campaigns.harnesses.program import main

if __name__ == "__main__":
    main()
