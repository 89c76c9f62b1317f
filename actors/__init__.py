"""Actors run environments, generators sample tokens. Neither imports the learner."""
