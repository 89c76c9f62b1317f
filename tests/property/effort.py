"""Effort of the property tests: OFFBEAT_EFFORT=50 (`make soak`) for a night, 1 for every change."""

import os

EFFORT = int(os.environ.get("OFFBEAT_EFFORT", "1"))
"""Factor by which each test's number of examples is multiplied."""
