"""What grows with actors and with the length of trajectories."""
