"""A campaign that injects faults into the real system."""
