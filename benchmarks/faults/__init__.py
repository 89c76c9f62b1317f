"""A campaign of faults against the real system."""
