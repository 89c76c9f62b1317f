"""Pause of generation and delay until service for a new policy version."""
