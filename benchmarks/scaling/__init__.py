"""Costs that grow with the number of actors and with the length of trajectories."""
