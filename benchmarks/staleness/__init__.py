"""Reward after the same number of updates, with the policy lag forced to exact numbers of versions."""
