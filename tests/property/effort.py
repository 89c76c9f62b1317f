"""How hard the property tests search: OFFBEAT_EFFORT=50 (`make soak`) is for nights, 1 for every change."""

import os

EFFORT = int(os.environ.get("OFFBEAT_EFFORT", "1"))
"""Times as many examples as a test has by itself."""
